"""A rank that dies, hangs or fails ends the whole replica with its reason, and nothing waits for it.

Real processes over gloo; each test starts its own, for none survives.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from millstream_runtime.config import Device, RuntimeConfig
from millstream_runtime.distributed import leader as leader_module
from millstream_runtime.distributed.leader import Leader
from millstream_runtime.distributed.messages import Command, LoadShard, Measure
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.execution.execution_mode import Execution
from millstream_runtime.engine.request import Request, SamplingParams
from millstream_runtime.errors import FailureReason, InvalidConfigError, RuntimeFailure
from tests.support.tiny_model import write_tiny_model

pytestmark = pytest.mark.deep

ROOT = Path(__file__).parents[3]
PATIENCE_SECONDS = 120.0
SAMPLING = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def config(folder: Path, tensor_parallel_size: int = 2) -> RuntimeConfig:
    return RuntimeConfig(
        model=str(folder),
        served_model_name="tiny",
        device=Device.CPU,
        tensor_parallel_size=tensor_parallel_size,
        max_num_seqs=4,
        kv_cache_memory_bytes=8 << 20,
    )


def quietly(phase: str, message: str) -> None:
    return


def pid_of_rank_1(leader: Leader) -> int:
    return leader._ranks[0].process.pid


@pytest.fixture
def engine(folder: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Engine, int, list[RuntimeFailure]]]:
    """An engine on two ranks in the middle of an answer, the pid of rank 1, and the losses that the engine reports."""
    asked = getattr(request, "param", {})
    leader = Leader(2, torch.device("cpu"), exchange_timeout_seconds=asked.get("timeout_seconds", PATIENCE_SECONDS))
    execution = Execution(overlapped=asked.get("overlapped", False))
    engine = Engine(config(folder), quietly, rank_group=leader, execution=execution)
    losses: list[RuntimeFailure] = []
    engine.when_lost(losses.append)
    engine.add_request(Request("one", [1, 2, 3], SAMPLING))
    for number in range(3):
        assert engine.step() or (execution.overlapped and number == 0)
    yield engine, pid_of_rank_1(leader), losses
    engine.close()
    assert not is_alive(pid_of_rank_1(leader))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} lives on"
        time.sleep(0.05)


@pytest.mark.parametrize("engine", [{}, {"overlapped": True}], indirect=True, ids=["plain", "overlapped"])
def test_a_killed_rank_fails_the_running_step_and_is_told_once(
    engine: tuple[Engine, int, list[RuntimeFailure]],
) -> None:
    running, pid, told = engine
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RuntimeFailure, match=r"Rank 1 was killed by SIGKILL") as caught:
        list(iter(running.step, []))
    assert caught.value.reason is FailureReason.NCCL_FAILED
    assert running.has_work()
    with pytest.raises(RuntimeFailure, match=r"Rank 1 was killed by SIGKILL"):
        running.step()
    assert [(one.reason, one.message) for one in told] == [(FailureReason.NCCL_FAILED, caught.value.message)]


@pytest.mark.parametrize("engine", [{"timeout_seconds": 3.0}], indirect=True)
def test_a_rank_that_lives_but_does_not_answer_runs_into_the_timeout(
    engine: tuple[Engine, int, list[RuntimeFailure]],
) -> None:
    running, pid, _ = engine
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RuntimeFailure, match=r"The ranks lost each other: .*[Tt]ime") as caught:
        running.step()
    assert caught.value.reason is FailureReason.NCCL_FAILED
    assert "\n" not in caught.value.message


def test_a_rank_that_is_stuck_while_it_measures_memory_runs_into_the_timeout(folder: Path) -> None:
    leader = Leader(2, torch.device("cpu"), exchange_timeout_seconds=3.0)
    broadcast = leader.broadcast

    def stop_before_it_measures(command: Command) -> None:
        if isinstance(command, Measure):
            os.kill(pid_of_rank_1(leader), signal.SIGSTOP)
        broadcast(command)

    leader.broadcast = stop_before_it_measures  # type: ignore[method-assign]
    with pytest.raises(RuntimeFailure, match=r"^Rank 1 did not answer in 3 s: it is stuck\.$") as caught:
        Engine(config(folder), quietly, rank_group=leader)
    assert caught.value.reason is FailureReason.NCCL_FAILED
    assert not is_alive(pid_of_rank_1(leader))


def test_a_rank_that_is_stopped_while_it_loads_ends_the_boot(folder: Path) -> None:
    leader = Leader(2, torch.device("cpu"), idle_load_seconds=2.0)
    broadcast = leader.broadcast

    def stop_before_it_loads(command: Command) -> None:
        if isinstance(command, LoadShard):
            os.kill(pid_of_rank_1(leader), signal.SIGSTOP)
        broadcast(command)

    leader.broadcast = stop_before_it_loads  # type: ignore[method-assign]
    with pytest.raises(RuntimeFailure, match=r"^Rank 1 has computed nothing for 2 s while it loads: ") as caught:
        Engine(config(folder), quietly, rank_group=leader)
    assert caught.value.reason is FailureReason.NCCL_FAILED
    assert not is_alive(pid_of_rank_1(leader))


def test_a_rank_that_is_stopped_while_it_starts_ends_the_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def start_stopped(*arguments: object, **options: object) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(*arguments, **options)  # type: ignore[call-overload]
        os.kill(process.pid, signal.SIGSTOP)
        started.append(process.pid)
        return process  # type: ignore[no-any-return]

    monkeypatch.setattr(leader_module, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": start_stopped}))
    with pytest.raises(RuntimeFailure, match=r"^Rank 1 has computed nothing for 2 s while it loads: "):
        Leader(2, torch.device("cpu"), idle_load_seconds=2.0)
    assert not is_alive(started[0])


def test_a_rank_that_loads_for_longer_than_the_bound_and_computes_meanwhile_is_waited_for(folder: Path) -> None:
    leader = Leader(2, torch.device("cpu"), idle_load_seconds=1.0)
    pid, ended = pid_of_rank_1(leader), threading.Event()

    def stop_and_continue() -> None:
        while not ended.wait(0.3):  # slow: it computes in one third of the time
            os.kill(pid, signal.SIGSTOP)
            ended.wait(0.6)
            os.kill(pid, signal.SIGCONT)

    slow = threading.Thread(target=stop_and_continue)
    slow.start()
    try:
        engine = Engine(config(folder), quietly, rank_group=leader)
    finally:
        ended.set()
        slow.join()
    engine.close()


def test_what_only_rank_one_reads_is_refused_in_its_words(folder: Path, tmp_path: Path) -> None:
    """NaN in the second half of a weight: rank 0 never sees it."""
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][100, 3] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeFailure, match=r"^Rank 1: .*layers\.1\.mlp\.up_proj") as caught:
        Engine(config(tmp_path), quietly)
    assert caught.value.reason is FailureReason.CHECKPOINT_INVALID


@pytest.mark.quick
def test_a_size_that_cannot_be_is_refused_before_anything_is_started(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    with pytest.raises(InvalidConfigError, match=r"tensor-parallel-size is 3; it must divide num_attention_heads"):
        Engine(config(folder, tensor_parallel_size=3), quietly)


LEADER = """
import os, signal, torch
from millstream_runtime.distributed import leader as leader_module
from millstream_runtime.distributed.leader import Leader
from millstream_runtime.distributed.messages import Command, LoadShard, Measure
if __name__ == "__main__":
    leader = Leader(2, torch.device("cpu"))
    print(*(rank.process.pid for rank in leader._ranks), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_ranks_end_with_their_leader_however_it_ends() -> None:
    done = subprocess.run([sys.executable, "-c", LEADER], stdout=subprocess.PIPE, text=True, check=False, timeout=240)
    assert done.returncode == -signal.SIGKILL
    wait_until_gone(int(done.stdout))


def test_a_server_on_two_ranks_shows_its_topology_and_ends_with_the_reason_of_a_lost_rank(
    folder: Path, tmp_path: Path
) -> None:
    termination_log = tmp_path / "termination-log"
    termination_log.touch()
    command = [sys.executable, "-m", "millstream", "serve", str(folder), "--tensor-parallel-size=2", "--port=0"]
    command += ["--device=cpu", "--kv-cache-memory-bytes=8388608"]
    environment = {**os.environ, "MILLSTREAM_TERMINATION_LOG": str(termination_log)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stderr is not None
            url = next(
                found[1] for line in server.stderr if (found := re.search(r"Ready in .* at (http://\S+)/v1", line))
            )
            answer = httpx.post(
                f"{url}/v1/completions", json={"model": "tiny", "prompt": "x", "max_tokens": 4}, timeout=60
            )
            assert answer.status_code == 200
            topology = httpx.get(f"{url}/ready").json()["topology"]
            assert (topology["world_size"], topology["backend"], topology["link"]) == (2, "gloo", "Memory")
            assert topology["allreduce_bytes_per_second"] > 0
            metrics = httpx.get(f"{url}/metrics").text
            assert re.search(r"^millstream_allreduce_bytes_per_second\{.*\} [1-9]", metrics, re.MULTILINE)
            assert re.search(r'^millstream_topology_info\{.*backend="gloo".*\} 1.0', metrics, re.MULTILINE)
            [rank] = ranks_below(server.pid)
            os.kill(rank, signal.SIGKILL)  # while it is idle: nobody asks for anything
            server.communicate(timeout=PATIENCE_SECONDS)
        finally:
            server.kill()
    assert server.returncode == 1
    report = json.loads(termination_log.read_text())
    assert report == {"reason": "NCCLFailed", "message": "Rank 1 was killed by SIGKILL (often for want of memory)."}


def ranks_below(pid: int) -> list[int]:
    """Descendants of a process that are ranks."""
    children = [
        int(child) for path in Path(f"/proc/{pid}/task").iterdir() for child in (path / "children").read_text().split()
    ]
    found = [child for child in children if "distributed.follower" in Path(f"/proc/{child}/cmdline").read_text()]
    return found + [rank for child in children for rank in ranks_below(child)]
