"""Documents to judge a result by, kept away from what it is made from.

    file ─► documents, each once, shuffled ─► those that are held out, by slice
                                           └► the others

All choices are seeded: the same file gives the same parts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from millstream_runtime.quality.documents import DEFAULT_SLICE, Document, TokenizedDocument, content_of
from millstream_runtime.quality.verdict import MIN_DOCUMENTS, MIN_TOKENS

HELD_OUT_SHARE = 0.1
MAX_HELD_OUT_DOCUMENTS = 200  # of a slice; more would take longer to judge than to make
MAX_JUDGED_TOKENS = 2048  # of a document: what `millstream quality` reads by default

Tokenize = Callable[[Document], TokenizedDocument]


def shuffled_once(
    documents: Sequence[Document], seed: int, key: Callable[[Document], str] = content_of
) -> list[Document]:
    """Return the documents in a seeded order, the first one of those with the same key."""
    unique = list({key(one): one for one in reversed(documents)}.values())
    random.Random(seed).shuffle(unique)  # noqa: S311 - reproducible, not secret
    return unique


def held_out_of(
    documents: Sequence[Document], tokenized: Tokenize, max_tokens: int = MAX_JUDGED_TOKENS
) -> list[Document]:
    """A tenth of each slice, at least what a verdict on it needs, at most half. Where a slice is too small for a
    verdict, all are judged as one; none where even that is too little. `max_tokens`: of a document that is judged."""

    def judged(document: Document) -> int:
        found = tokenized(document)
        return min(len(found.token_ids), max_tokens) - found.num_prompt_tokens

    by_slice = {name: [one for one in documents if one.slice == name] for name in _slices(documents)}
    found = [_share(own, judged) for own in by_slice.values()]
    if not all(_is_enough(one, judged) for one in found):
        merged = [replace(one, slice=DEFAULT_SLICE) for one in documents]
        found = [_share(merged, judged)]
    return [one for own in found for one in own] if all(_is_enough(one, judged) for one in found) else []


def _slices(documents: Sequence[Document]) -> list[str]:
    return list(dict.fromkeys(one.slice for one in documents))


def _share(documents: Sequence[Document], judged: Callable[[Document], int]) -> list[Document]:
    wanted = max(MIN_DOCUMENTS, min(MAX_HELD_OUT_DOCUMENTS, int(HELD_OUT_SHARE * len(documents))))
    found: list[Document] = []
    num_tokens = 0
    for document in documents:
        if len(found) >= len(documents) // 2 or (len(found) >= wanted and num_tokens >= MIN_TOKENS):
            break
        if (count := judged(document)) > 0:
            found.append(document)
            num_tokens += count
    return found


def _is_enough(documents: Sequence[Document], judged: Callable[[Document], int]) -> bool:
    return len(documents) >= MIN_DOCUMENTS and sum(map(judged, documents)) >= MIN_TOKENS


def line_of(document: Document) -> str:
    """The document as a line of the file that it came from."""
    if document.messages:
        answer = {"role": "assistant", "content": document.answer}
        found: dict[str, object] = {"messages": [*document.messages, answer]}
    elif document.prompt:
        found = {"prompt": document.prompt, "completion": document.answer}
    else:
        found = {"text": document.answer}
    return json.dumps(found | {"slice": document.slice}, ensure_ascii=False)
