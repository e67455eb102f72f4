"""`millstream quantize` in a process that dies at a file: a fork of one process, which has loaded torch and no test."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from unittest.mock import patch

from torch import Tensor

from millstream.cli import main
from millstream_runtime.quantize.output import safetensors_file, work_folder

CHILDREN = multiprocessing.get_context("forkserver")
CHILDREN.set_forkserver_preload([__name__, "millstream_runtime.quantize.make"])


def killed(number: int, when: str, model: Path, out: Path, *flags: str) -> None:
    """Run the command until SIGKILL at the file of layer `number`: before it is written, or with half of it written."""
    child = CHILDREN.Process(target=_run, args=(number, when, ["quantize", str(model), f"--out={out}", *flags]))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert not out.exists()


def _run(number: int, when: str, argv: list[str]) -> None:
    def write_file(path: Path, tensors: dict[str, Tensor]) -> None:
        if f"-{number + 1:05}-of" in path.name:
            if when == "within":
                safetensors_file.write_file(path, tensors)
                os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        safetensors_file.write_file(path, tensors)

    with patch.object(work_folder, "write_file", write_file):
        main([*argv, "--device=cpu"])
