"""Token ids with the target's distributions at the positions that a draft may have to propose; as a safetensors file.

A distribution is its TOP most probable tokens; what is left is one number, the rest of the probability. So a token
takes 6 * TOP bytes, whatever the vocabulary, and the target need not be in memory when the draft is trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import torch
from torch import Tensor

from millstream_runtime.quantize.output.safetensors_file import tensors_of, write_file


class Kind(IntEnum):
    """Who wrote the tokens from the first position on: the target (greedy, or drawn), or the document."""

    GREEDY = 0
    SAMPLED = 1
    TEXT = 2


@dataclass(frozen=True, slots=True)
class TargetSequence:
    """`slice` and `is_general` as in `Prompt`.

    Attributes:
        token_ids: int32 `[T]`.
        first: of the positions with a distribution, which are `first` to T - 1.
        top_ids, top_logprobs: int32 and float16 `[T - first, TOP]`, the most probable token first.
    """

    slice: str
    is_general: bool
    kind: Kind
    token_ids: Tensor
    first: int
    top_ids: Tensor
    top_logprobs: Tensor

    @property
    def is_answer(self) -> bool:
        return self.kind is not Kind.TEXT

    @property
    def num_positions(self) -> int:
        """With a distribution."""
        return len(self.top_ids)


def write_sequences(path: Path, sequences: Sequence[TargetSequence]) -> None:
    """Write them. Slices are not in the file: `read_sequences` gets them."""
    rows = [[len(one.token_ids), one.first, int(one.kind)] for one in sequences]
    tensors: Mapping[str, Tensor] = {
        "sequences": torch.tensor(rows, dtype=torch.int32).view(-1, 3),
        "token_ids": torch.cat([one.token_ids for one in sequences]),
        "top_ids": torch.cat([one.top_ids for one in sequences]),
        "top_logprobs": torch.cat([one.top_logprobs for one in sequences]),
    }
    write_file(path, tensors)


def read_sequences(path: Path, slices: Sequence[tuple[str, bool]]) -> list[TargetSequence]:
    """Return the sequences of a file. `slices`: `slice` and `is_general` of each, in the order of the file."""
    tensors = {name: one.load() for name, one in tensors_of(path).items()}
    found, token, row = [], 0, 0
    for (name, is_general), (length, first, kind) in zip(slices, tensors["sequences"].tolist(), strict=True):
        rows = slice(row, row + length - first)
        found.append(
            TargetSequence(
                name,
                is_general,
                Kind(kind),
                tensors["token_ids"][token : token + length],
                first,
                tensors["top_ids"][rows],
                tensors["top_logprobs"][rows],
            )
        )
        token, row = token + length, rows.stop
    return found
