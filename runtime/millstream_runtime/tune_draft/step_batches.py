"""Which sequences each step of the training sees: a function of the seed and the step's number, so it can go on.

Of two streams, the user's data and general text, each has its share of every step, and gives its sequences in another
order each time it has given all of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from millstream_runtime.tune_draft.target_sequence import TargetSequence

GENERAL_SHARE = 0.25  # of a step, where there is general text


class StepBatches:
    """`rows`: sequences of a step."""

    def __init__(self, sequences: Sequence[TargetSequence], rows: int, seed: int) -> None:
        streams = [[one for one in sequences if one.is_general is general] for general in (False, True)]
        num_general = max(1, round(GENERAL_SHARE * rows)) if streams[1] else 0
        self._streams = list(zip(streams, (rows - num_general, num_general), strict=True))
        self._seed = seed

    def of(self, step: int) -> list[TargetSequence]:
        """Return the sequences of a step, counted from 0; the shortest first."""
        found = []
        for number, (stream, count) in enumerate(self._streams):
            for place in range(step * count, (step + 1) * count):
                epoch, index = divmod(place, len(stream))
                found.append(stream[self._order(number, epoch, len(stream))[index]])
        return sorted(found, key=lambda one: len(one.token_ids))

    def _order(self, stream: int, epoch: int, size: int) -> list[int]:
        order = list(range(size))
        random.Random(f"{self._seed} {stream} {epoch}").shuffle(order)  # noqa: S311 - reproducible, not secret
        return order


def in_parts(sequences: Sequence[TargetSequence], max_tokens: int) -> Iterator[list[TargetSequence]]:
    """Yield neighbours together, padded to at most `max_tokens`, at least one; `sequences`: the shortest first."""
    part: list[TargetSequence] = []
    for one in sequences:
        if part and len(one.token_ids) * (len(part) + 1) > max_tokens:
            yield part
            part = []
        part.append(one)
    if part:
        yield part
