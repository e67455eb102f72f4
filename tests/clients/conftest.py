"""A server of the demo model for all tests of this folder, and the programs of requirements/clients.txt."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream_runtime.config import DType
from tests.support.engine_processes import serving_from_a_process
from tests.support.server_thread import ServerThread

ROOT = Path(__file__).resolve().parents[2]
DEMO_MODEL = ROOT / "models" / "demo-chat"
TOOLS = Path(os.environ.get("MILLSTREAM_CLIENTS", ROOT / ".tools"))
PROGRAMS = TOOLS / "clients" / "bin"
NODE_MODULES = TOOLS / "clients-node" / "node_modules"
# lm-eval reads ten thousand task files before it begins. A program that loops is ended by its own processor time, since
# a busy machine may give it little of each second; one that waits for ever, by the limit of its test.
MOST_PROCESSOR_SECONDS = 600
MOST_TEST_SECONDS = 3600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(MOST_TEST_SECONDS))


@pytest.fixture(scope="session")
def demo_server() -> Iterator[ServerThread]:
    """In float32, in which `transformers` computes what the clients' figures are compared with."""
    settings: dict[str, Any] = {"kv_cache_memory_bytes": 64 << 20, "dtype": DType.FLOAT32}
    with serving_from_a_process(DEMO_MODEL, served_model_name="demo-chat", **settings) as (server, _):
        yield server.wait_ready()


class Program:
    """A client of its own environment. Nothing it wants from a hub is there: it works with what this test gives it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, name: str, *arguments: str, **environment: str) -> str:
        """Run it to its end; what it printed. It must succeed."""
        program = PROGRAMS / name
        assert program.exists(), f"{program} is missing; run `make clients`"
        # By its interpreter: a script names the folder in which the environment was made, which may have moved since.
        command = [str(PROGRAMS / "python"), str(program), *arguments]
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(self.folder / "hub")}
        return run(command, self.folder, {**offline, **environment})


def run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    """Output of a command that must succeed."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**inherited, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=_limit_processor_time,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


def _limit_processor_time() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_PROCESSOR_SECONDS, MOST_PROCESSOR_SECONDS))


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path)
