"""A rank beyond 0 for tests on a CPU: `python -m tests.support.recording_follower LINK LIFELINE`.

Its graphs are tapes, its Triton kernels are interpreted, and it can refuse both. By the environment:

    MILLSTREAM_TEST_RECORDED   recordings after which it refuses more
    MILLSTREAM_TEST_KERNELS    a folder: `refused` names a part whose kernel cannot start; `launched` gets what was
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from millstream_runtime.distributed.follower import main
from millstream_runtime.engine.execution import rank_kernels
from millstream_runtime.engine.execution.rank_kernels import LoadedShard
from millstream_runtime.engine.kernel_backends import Backend, KernelChoice
from tests.support.eager_recorder import EagerRecorder
from tests.support.tape_recorder import TapeRecorder

MODULE = "tests.support.recording_follower"
RECORDED, KERNELS = "MILLSTREAM_TEST_RECORDED", "MILLSTREAM_TEST_KERNELS"


def recorder(device: torch.device) -> TapeRecorder:
    """The recorder of a device."""
    asked = os.environ.get(RECORDED)
    return TapeRecorder(None if asked is None else int(asked))


def refuse_parts(refused: Path) -> None:
    """A part that the file names has a kernel that cannot start here."""
    load = rank_kernels.load

    def refusing(*arguments: Any) -> LoadedShard:
        loaded = load(*arguments)
        part = refused.read_text() if refused.exists() else None
        kernels = tuple(
            KernelChoice(one.part, Backend.TORCH, "out of shared memory")
            if one.part == part and one.backend is Backend.TRITON
            else one
            for one in loaded.kernels
        )
        return loaded._replace(kernels=kernels)

    rank_kernels.load = refusing  # type: ignore[assignment]


def serve() -> int:
    """Serve the leader; return the exit code."""
    link, lifeline = int(sys.argv[1]), int(sys.argv[2])
    if KERNELS not in os.environ:
        return main(link, lifeline, recorder)
    from tests.support.kernel_launches import Launch, recording_launches
    from tests.support.triton_interpreter import interpreting

    folder = Path(os.environ[KERNELS])
    refuse_parts(folder / "refused")

    class Written(list[Launch]):
        """Writes each kernel's name at its first start: a busy machine's leader may kill this process at the end."""

        def append(self, launch: Launch) -> None:
            if launch.kernel not in {one.kernel for one in self}:
                super().append(launch)
                with (folder / "launched").open("a") as file:
                    file.write(f"{launch.kernel}\n")

    with interpreting(), recording_launches(into=Written()):
        return main(link, lifeline, lambda device: EagerRecorder())  # no tape holds what is interpreted


if __name__ == "__main__":
    code = serve()
    sys.stderr.flush()
    os._exit(code)
