"""Calibration data: documents without duplicates, a part held out to judge the result, the rest packed to sequences.

    file ─► documents, each once, shuffled ─┬─► held out, by slice
                                            └─► token ids, one document after another, cut to sequences

All choices are seeded: the same file gives the same sequences.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from millstream_runtime.errors import InvalidConfigError
from millstream_runtime.quality.documents import DEFAULT_SLICE, Document, TokenizedDocument, read_documents, tokenize
from millstream_runtime.quality.verdict import MIN_DOCUMENTS, MIN_TOKENS
from millstream_runtime.tokenizing.tokenizer import Tokenizer

HELD_OUT_SHARE = 0.1
MAX_HELD_OUT_DOCUMENTS = 200  # of a slice; more would take longer to judge than to quantize
MAX_DOCUMENT_TOKENS = 1 << 20
MAX_JUDGED_TOKENS = 2048  # of a document: what `millstream quality` reads by default

Tokenize = Callable[[Document], TokenizedDocument]


@dataclass(frozen=True, slots=True)
class CalibrationData:
    """`sequences`: token ids, all of one length. `held_out`: lines of JSON for `millstream quality`; may be empty."""

    sequences: list[list[int]]
    held_out: list[str]
    num_duplicates: int  # lines that repeat another one


def read_calibration(
    path: Path,
    tokenizer: Tokenizer,
    eos_token_ids: frozenset[int],
    *,
    sequence_tokens: int,
    max_sequences: int,
    seed: int,
    least_tokens: int,
    hold_out: bool,
    must_judge: bool,
) -> CalibrationData:
    """Read and pack a file.

    Args:
        sequence_tokens, max_sequences: the length of a sequence, and how many are taken at most.
        least_tokens: how many the sequences must have.
        hold_out: keep a part away from calibration, to judge the result by; a part that is too small for a verdict is
            an error where it `must_judge`.

    Raises:
        InvalidConfigError: a line is no document (with its number), or there is too little data (with the minimum).
    """

    def tokenized(document: Document) -> TokenizedDocument:
        return tokenize([document], tokenizer, eos_token_ids, MAX_DOCUMENT_TOKENS)[0]

    documents = read_documents(path, flag="--calibration")
    unique = list({_content(one): one for one in reversed(documents)}.values())
    random.Random(seed).shuffle(unique)  # noqa: S311 - reproducible, not secret
    held_out = _held_out(unique, tokenized) if hold_out else []
    judged = {document.line for document in held_out}
    stream: list[int] = []
    for document in unique:
        if len(stream) >= sequence_tokens * max_sequences:
            break
        if document.line not in judged:
            stream += tokenized(document).token_ids
    must_judge = must_judge and hold_out
    if len(stream) < least_tokens or (must_judge and not held_out):
        raise InvalidConfigError(_too_little(path, len(unique), len(stream), least_tokens, must_judge))
    starts = range(0, len(stream) - sequence_tokens + 1, sequence_tokens)[:max_sequences]
    return CalibrationData(
        [stream[start : start + sequence_tokens] for start in starts],
        [_line(document) for document in held_out],
        len(documents) - len(unique),
    )


def _held_out(documents: Sequence[Document], tokenized: Tokenize) -> list[Document]:
    """A tenth of each slice, at least what a verdict on it needs, at most half. Where a slice is too small for a
    verdict, all are judged as one; none where even that is too little."""
    by_slice = {name: [one for one in documents if one.slice == name] for name in _slices(documents)}
    found = [_share(own, tokenized) for own in by_slice.values()]
    if not all(_is_enough(one, tokenized) for one in found):
        merged = [Document(one.line, DEFAULT_SLICE, one.messages, one.prompt, one.answer) for one in documents]
        found = [_share(merged, tokenized)]
    return [one for own in found for one in own] if all(_is_enough(one, tokenized) for one in found) else []


def _slices(documents: Sequence[Document]) -> list[str]:
    return list(dict.fromkeys(one.slice for one in documents))


def _share(documents: Sequence[Document], tokenized: Tokenize) -> list[Document]:
    wanted = max(MIN_DOCUMENTS, min(MAX_HELD_OUT_DOCUMENTS, int(HELD_OUT_SHARE * len(documents))))
    found: list[Document] = []
    num_tokens = 0
    for document in documents:
        if len(found) >= len(documents) // 2 or (len(found) >= wanted and num_tokens >= MIN_TOKENS):
            break
        judged = _judged(tokenized(document))
        if judged > 0:
            found.append(document)
            num_tokens += judged
    return found


def _is_enough(documents: Sequence[Document], tokenized: Tokenize) -> bool:
    num_tokens = sum(_judged(tokenized(one)) for one in documents)
    return len(documents) >= MIN_DOCUMENTS and num_tokens >= MIN_TOKENS


def _judged(one: TokenizedDocument) -> int:
    return min(len(one.token_ids), MAX_JUDGED_TOKENS) - one.num_prompt_tokens


def _content(document: Document) -> str:
    return json.dumps([document.messages, document.prompt, document.answer])


def _line(document: Document) -> str:
    """The document as a line of the file that it came from."""
    if document.messages:
        answer = {"role": "assistant", "content": document.answer}
        found: dict[str, object] = {"messages": [*document.messages, answer]}
    elif document.prompt:
        found = {"prompt": document.prompt, "completion": document.answer}
    else:
        found = {"text": document.answer}
    return json.dumps(found | {"slice": document.slice}, ensure_ascii=False)


def _too_little(path: Path, num_documents: int, num_tokens: int, least_tokens: int, must_judge: bool) -> str:
    needed = [f"{least_tokens} tokens to calibrate with"] if least_tokens else []
    if must_judge:
        needed.append(
            f"{2 * MIN_DOCUMENTS} documents, of which half is held out to judge the result by {MIN_TOKENS} tokens"
        )
    return (
        f"--calibration {path} has {num_documents} different documents, and {num_tokens} tokens to calibrate "
        f"with. The least is {' and '.join(needed)}. Add documents"
        + (", or give --held-out or --no-quality." if must_judge else ".")
    )
