"""A tape that holds launches of kernels, which the interpreter computes: a graph of a pass with Triton's kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.jit import JITFunction

from tests.support.tape_recorder import Tape, TapeRecorder


class KernelTapeRecorder(TapeRecorder):
    """`TapeRecorder` inside `interpreting`. A launch is replayed with the numbers and addresses of its first time."""

    @contextmanager
    def holding(self, tape: Tape) -> Iterator[None]:
        launch = JITFunction.run

        def run(self: JITFunction, *args: Any, **named: Any) -> None:
            with _disable_current_modes():  # what the interpreter itself does is no part of the pass
                launch(self, *args, **named)
            tape.operations.append(partial(launch, self, *args, **named))

        with patch.object(JITFunction, "run", run):
            yield
