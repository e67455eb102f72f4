"""llama.cpp as a contender: its Python package in an environment of its own, where it is installed (`make peers`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.cases import MAX_NEW_TOKENS, MAX_PROMPT_TOKENS, NUM_CONCURRENT, Case

HERE = Path(__file__).parent
PEERS = HERE.parent / ".tools" / "peers"
PEERS_PYTHON = PEERS / "llama-cpp-python" / "bin" / "python"
LIBRARIES = PEERS / "llama.cpp" / "build" / "bin"  # which the package loads
CONTEXT_STEP_TOKENS = 256  # llama.cpp rounds a sequence's context up to this


class NotInstalledError(Exception):
    """No interpreter here has llama-cpp-python and gguf; `str()` says how to get one."""


def find_interpreter(given: Path | None = None) -> Path:
    """The Python that has llama.cpp: `given`, that of `make peers`, or this one.

    Raises:
        NotInstalledError: none has.
    """
    probe = "import llama_cpp, gguf"
    for python in [given] if given is not None else [PEERS_PYTHON, Path(sys.executable)]:
        if python.exists():
            found = subprocess.run([python, "-c", probe], capture_output=True, check=False, env=environment())
            if not found.returncode:
                return python
    raise NotInstalledError("not installed (`make peers` builds it)")


def environment() -> dict[str, str]:
    """Variables with which the package finds the libraries that `make peers` has built."""
    return {**os.environ, "LLAMA_CPP_LIB_PATH": str(LIBRARIES)} if LIBRARIES.exists() else dict(os.environ)


class LlamaCpp:
    """llama.cpp with float32 weights and KV cache, in a worker process that sleeps between its runs."""

    def __init__(self, folder: Path, scratch: Path, python: Path, threads: int) -> None:
        self.name = "llama.cpp float32"
        model = scratch / f"{folder.name}.gguf"
        subprocess.run([python, HERE / "gguf_llama.py", folder, model], check=True)
        tokens_each = -(-(MAX_PROMPT_TOKENS + MAX_NEW_TOKENS) // CONTEXT_STEP_TOKENS) * CONTEXT_STEP_TOKENS
        arguments = [str(model), str(threads), str(NUM_CONCURRENT), str(tokens_each)]
        self._process = subprocess.Popen(
            [python, HERE / "llama_cpp_worker.py", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        self.about = self._read()

    def run(self, case: Case) -> tuple[float, list[list[int]]]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": case.prompts, "new_tokens": case.new_tokens}) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        return float(answer["seconds"]), answer["answers"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the llama.cpp worker ended with exit code {self._process.wait(60)}")
        answer: dict[str, Any] = json.loads(line)
        return answer
