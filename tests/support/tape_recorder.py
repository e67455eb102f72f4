"""What a CUDA graph does, on a CPU: the operations of one pass are written down, and replayed on the same memory.

A replay runs no Python of the pass. Whatever the pass took from the host when it was recorded (a length, a shape, a
branch) is frozen, exactly as in a graph; only what it reads from tensors can differ. Reading a number back to the host,
which ends a capture on CUDA, ends this one too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from millstream_runtime.engine.execution.graphs.recorders import CaptureError, Recorded

_READS_BACK = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::is_nonzero", "aten::equal"}
_ALL_REDUCE = "c10d::allreduce_"
BYTES_PER_OPERATION = 1  # so that sums of bytes are not zero


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`operations`: what a replay calls, one after another."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in _READS_BACK:
            raise RuntimeError(f"{func._schema.name} waits for the device: it cannot be recorded")
        result = func(*args, **(kwargs or {}))
        self.operations.append(partial(_compute_again, func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        with torch.inference_mode():
            for operation in self.operations:
                operation()


def _compute_again(func: Any, args: Any, kwargs: Any, recorded: Any) -> None:
    if func._schema.name == _ALL_REDUCE:  # by what waits for it
        dist.all_reduce(args[0][0])
        return
    result = func(*args, **kwargs)
    for new, old in zip(tree_leaves(result), tree_leaves(recorded), strict=True):
        if isinstance(old, torch.Tensor) and new.data_ptr() != old.data_ptr():
            old.copy_(new)  # a graph writes its results where they were when it was recorded


class TapeRecorder:
    """`engine.recorders.Recorder`. `tapes`: the operations of each recording; `fail_after`: then memory is short."""

    def __init__(self, fail_after: int | None = None) -> None:
        self.tapes: list[int] = []
        self._fail_after = fail_after

    @contextmanager
    def holding(self, tape: Tape) -> Iterator[None]:
        """Around a pass that is written down."""
        yield

    def record(self, compute: Callable[[], None]) -> Recorded:
        compute()
        tape = Tape()
        with self.holding(tape), tape:
            compute()
        # Unlike a capture, a tape has exchanged tensors with other ranks by now: they do the same.
        if self._fail_after is not None and len(self.tapes) >= self._fail_after:
            raise CaptureError("no memory for another graph")
        self.tapes.append(len(tape.operations))
        return Recorded(tape.replay, 0.25, len(tape.operations) * BYTES_PER_OPERATION)
