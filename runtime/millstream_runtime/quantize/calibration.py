"""Calibration data: documents without duplicates, a part held out to judge the result, the rest packed to sequences.

    file ─► documents, each once, shuffled ─┬─► held out, by slice
                                            └─► token ids, one document after another, cut to sequences

All choices are seeded: the same file gives the same sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from millstream_runtime.errors import InvalidConfigError
from millstream_runtime.quality.documents import Document, TokenizedDocument, read_documents, tokenize
from millstream_runtime.quality.held_out_part import held_out_of, line_of, shuffled_once
from millstream_runtime.quality.verdict import MIN_DOCUMENTS, MIN_TOKENS
from millstream_runtime.tokenizing.tokenizer import Tokenizer

MAX_DOCUMENT_TOKENS = 1 << 20


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
    judged_tokens: int,
) -> CalibrationData:
    """Read and pack a file.

    Args:
        sequence_tokens, max_sequences: the length of a sequence, and how many are taken at most.
        least_tokens: how many the sequences must have.
        hold_out: keep a part away from calibration, to judge the result by; a part that is too small for a verdict is
            an error where it `must_judge`.
        judged_tokens: of a document that is held out, at most.

    Raises:
        InvalidConfigError: a line is no document (with its number), or there is too little data (with the minimum).
    """

    def tokenized(document: Document) -> TokenizedDocument:
        return tokenize([document], tokenizer, eos_token_ids, MAX_DOCUMENT_TOKENS)[0]

    documents = read_documents(path, flag="--calibration")
    unique = shuffled_once(documents, seed)
    held_out = held_out_of(unique, tokenized, judged_tokens) if hold_out else []
    judged = {document.line for document in held_out}
    stream: list[int] = []
    for document in unique:
        if len(stream) >= sequence_tokens * max_sequences:
            break
        if document.line not in judged:
            stream += tokenized(document).token_ids
    must_judge = must_judge and hold_out
    starts = range(0, len(stream) - sequence_tokens + 1, sequence_tokens)[:max_sequences]
    if len(starts) * sequence_tokens < least_tokens or (must_judge and not held_out):
        raise InvalidConfigError(
            _too_little(path, len(unique), len(stream), sequence_tokens, least_tokens, must_judge=must_judge)
        )
    return CalibrationData(
        [stream[start : start + sequence_tokens] for start in starts],
        [line_of(document) for document in held_out],
        len(documents) - len(unique),
    )


def _too_little(
    path: Path, num_documents: int, num_tokens: int, sequence_tokens: int, least_tokens: int, *, must_judge: bool
) -> str:
    whole = f" in whole sequences of {sequence_tokens} (--sequence-tokens)" if num_tokens >= least_tokens else ""
    needed = [f"{least_tokens} tokens to calibrate with{whole}"] if least_tokens else []
    if must_judge:
        needed.append(
            f"{2 * MIN_DOCUMENTS} documents, of which half is held out to judge the result by {MIN_TOKENS} tokens"
        )
    return (
        f"--calibration {path} has {num_documents} different documents, and {num_tokens} tokens to calibrate "
        f"with. The least is {' and '.join(needed)}. Add documents"
        + (", or give --held-out or --no-quality." if must_judge else ".")
    )
