"""Hidden states of all calibration sequences on disk: float32 `[sequences, tokens, hidden]`, one sequence in memory.

Read and written with plain calls, not mapped: mapped pages count as memory of the process until the kernel takes them.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """The shape of a file of hidden states."""

    num_sequences: int
    num_tokens: int
    hidden_size: int

    @property
    def num_bytes(self) -> int:
        return self.num_sequences * self.num_tokens * self.hidden_size * 4

    def read(self, path: Path) -> Iterator[Tensor]:
        """Each sequence, `[tokens, hidden]`, in a tensor of its own."""
        with path.open("rb") as file:
            for _ in range(self.num_sequences):
                hidden = torch.empty(self.num_tokens, self.hidden_size)
                if file.readinto(hidden.view(-1).view(torch.uint8).numpy().data) != hidden.nbytes:
                    raise OSError(errno.EIO, f"{path} ends early")
                yield hidden

    def write(self, path: Path, sequences: Iterator[Tensor]) -> None:
        """Write the sequences one after another."""
        with path.open("wb") as file:
            for hidden in sequences:
                file.write(hidden.float().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
