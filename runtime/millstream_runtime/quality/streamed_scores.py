"""Compare two models of which memory holds one layer at a time, some documents after others.

    documents of a group ─► base, layer by layer ─► candidate, layer by layer ─► both output heads ─► scores

Hidden states of a group stay in memory, so each group reads both models once. How documents are grouped changes no
score.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from millstream_runtime.engine.host_limits import memory_limit_bytes, resident_bytes
from millstream_runtime.engine.kv.pool_size import gibibytes
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.job_memory.judging import GROUP_TOKENS, judging_bytes
from millstream_runtime.quality.documents import TokenizedDocument
from millstream_runtime.quality.streamed_model import ComputedDocument, StreamedModel
from millstream_runtime.quality.token_scores import DocumentScores, score

OnProgress = Callable[[int, int], None]  # done tokens, all tokens


@dataclass(frozen=True, slots=True)
class Room:
    """What may be used of the host's memory."""

    group_tokens: int  # of documents that are computed together
    copy_budget_bytes: int  # copies of the weights of one layer


def room_for(base: StreamedModel, candidate: StreamedModel, longest_tokens: int) -> Room:
    """Share out the memory: half of what is beyond the needed for copies, as in a server, a quarter for documents.

    Args:
        longest_tokens: of a document. Its hidden states are in memory at once, however many they are.

    Raises:
        RuntimeFailure: OutOfMemory, one layer and both output heads do not fit; on a GPU that is found when they are
            loaded.
    """
    models = (base, candidate)
    weights = [one.bytes for one in models if one.device.type == "cpu"]
    needed_bytes = judging_bytes(
        hidden_size=max(one.hidden_size for one in models),
        intermediate_size=max(one.intermediate_size for one in models),
        layer_bytes=max((one.layer for one in weights), default=0),
        head_bytes=max((one.head for one in weights), default=0),
        embedding_bytes=max((one.embedding for one in weights), default=0),
    )
    token_bytes = sum(one.hidden_size * one.dtype.itemsize for one in models)
    is_long = longest_tokens > GROUP_TOKENS
    needed_bytes += token_bytes * (longest_tokens - GROUP_TOKENS) if is_long else 0
    usable_bytes = max(0, memory_limit_bytes() - resident_bytes())
    if needed_bytes > usable_bytes:
        raise RuntimeFailure(
            FailureReason.OUT_OF_MEMORY,
            f"Judging needs {gibibytes(needed_bytes)} for one layer, both output heads and hidden states, and "
            f"{gibibytes(usable_bytes)} of memory is usable: compare the models on a machine with more memory"
            f"{f', or give a smaller --max-tokens (a document has {longest_tokens})' if is_long else ''}.",
        )
    more_bytes = usable_bytes - needed_bytes
    return Room(GROUP_TOKENS + more_bytes // 4 // token_bytes, more_bytes // 2 if weights else 0)


def stream_scores(
    base: StreamedModel,
    candidate: StreamedModel,
    documents: Sequence[TokenizedDocument],
    room: Room,
    on_progress: OnProgress,
) -> list[DocumentScores]:
    """Return the scores of each document, in their order.

    Raises:
        RuntimeFailure: a model cannot be loaded.
    """
    scores: list[DocumentScores] = []
    all_tokens, done_tokens = sum(len(one.token_ids) for one in documents), 0
    for group in _groups(documents, room.group_tokens):
        group_tokens = sum(len(one.token_ids) for one in group)
        hidden = []
        for place, model in enumerate((base, candidate)):

            def on_share(share: float, place: int = place, done: int = done_tokens, tokens: int = group_tokens) -> None:
                on_progress(done + int(tokens * (place + share) / 2), all_tokens)

            hidden.append(model.hidden_states(group, room.copy_budget_bytes, on_share))
        heads = base.head(), candidate.head()
        for document, *pair in zip(group, *hidden, strict=True):
            sides = [ComputedDocument(head, states) for head, states in zip(heads, pair, strict=True)]
            scores.append(score(sides[0], sides[1], document))
        done_tokens += group_tokens
    return scores


def _groups(documents: Sequence[TokenizedDocument], most_tokens: int) -> Iterator[list[TokenizedDocument]]:
    """As many documents as have `most_tokens`, at least one."""
    group: list[TokenizedDocument] = []
    num_tokens = 0
    for document in documents:
        if group and num_tokens + len(document.token_ids) > most_tokens:
            yield group
            group, num_tokens = [], 0
        group.append(document)
        num_tokens += len(document.token_ids)
    if group:
        yield group
