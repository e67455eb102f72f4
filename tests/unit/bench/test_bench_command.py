"""`millstream bench` as a person types it, against a real server in a thread and a real engine in this process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream.bench import compare
from millstream.bench.load_generator import LoadGenerator
from millstream.bench.measure import RequestRecord
from millstream.bench.workload import PlannedRequest
from millstream.cli import main
from tests.support.reserved_port import reserved_port
from tests.support.server_thread import ServerThread, serving, wait_for
from tests.support.tiny_model import write_tiny_model

pytestmark = pytest.mark.deep

SMALL = ("--token-ids=0:255", "--input-tokens=8:40", "--output-tokens=6:12")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerThread]:
    with serving(folder) as running:
        yield running.wait_ready()


def bench(server: ServerThread, out: Path, *flags: str) -> dict[str, Any]:
    """Run `bench serve`; what it saved."""
    assert main(["bench", "serve", f"--url={server.url}", f"--json={out}", *flags]) == 0
    return compare.read(out)


def test_an_open_loop_of_20_requests_and_the_counts_are_the_servers_own(
    server: ServerThread, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
    before = [server.metric(name) for name in names]
    picture = tmp_path / "run.svg"
    run = bench(
        server,
        tmp_path / "run.json",
        *SMALL,
        "--request-rate=40",
        "--num-requests=20",
        "--shared-prefix-tokens=4",
        "--goodput=ttft_ms:60000,itl_ms:60000",
        f"--plot={picture}",
    )
    after = [server.metric(name) for name in names]
    summary = run["summary"]
    rows = run["requests"]
    assert (summary["completed"], summary["failed"], summary["unfinished"]) == (20, 0, 0)
    assert [row["index"] for row in rows] == list(range(20))
    # The probe is one request of 16 tokens that asks for one.
    assert summary["prompt_tokens"] == sum(row["prompt_tokens"] for row in rows) == after[0] - before[0] - 16
    assert summary["completion_tokens"] == sum(row["completion_tokens"] for row in rows) == after[1] - before[1] - 1
    assert all(8 <= row["prompt_tokens"] <= 40 for row in rows)
    assert all(6 <= row["completion_tokens"] <= 12 for row in rows)
    assert all(0 < row["ttft_ms"] <= row["e2e_ms"] for row in rows)
    assert summary["goodput"]["requests"] == 20
    assert summary["ttft_ms"]["count"] == 20
    assert run["target"]["model"] == "tiny"
    assert run["environment"]["client"]["cpu"] in run["environment"]["hardware"]
    assert picture.read_text().startswith("<svg")
    assert "20 completed" in capsys.readouterr().out


def test_a_closed_loop_never_has_more_in_flight_than_its_clients(server: ServerThread, tmp_path: Path) -> None:
    run = bench(server, tmp_path / "run.json", *SMALL, "--concurrency=3", "--num-requests=9")
    spans = [(1e3 * row["arrival_seconds"], 1e3 * row["arrival_seconds"] + row["e2e_ms"]) for row in run["requests"]]
    overlap = max(sum(start <= at < end for start, end in spans) for at, _ in spans)
    assert len(spans) == 9
    # Both times are rounded to less than the time between an answer and the next request of the same client.
    assert overlap <= 3


def test_a_chat_of_words_comes_close_to_the_length_asked_for(server: ServerThread, tmp_path: Path) -> None:
    run = bench(
        server, tmp_path / "run.json", "--route=chat", "--input-tokens=400", "--output-tokens=4", "--concurrency=2",
        "--num-requests=4",
    )  # fmt: skip
    assert all(row["prompt_tokens"] == pytest.approx(400, rel=0.1) for row in run["requests"])


def test_a_trace_keeps_its_times_and_texts_here_and_offline(server: ServerThread, folder: Path, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    rows = [
        {"timestamp_seconds": 50.2, "input_tokens": 9, "output_tokens": 5},
        {"timestamp_seconds": 50.0, "prompt": "hello", "output_tokens": 3},
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    served = bench(server, tmp_path / "a.json", "--token-ids=0:255", f"--trace={trace}")
    flags = [f"--model={folder}", f"--trace={trace}", "--token-ids=0:255", f"--json={tmp_path / 'b.json'}"]
    assert main(["bench", "offline", *flags, "--device=cpu", "--kv-cache-memory-bytes=8388608"]) == 0
    offline = compare.read(tmp_path / "b.json")
    for run in (served, offline):
        assert [row["arrival_seconds"] for row in run["requests"]] == [0.0, pytest.approx(0.2)]
        assert [row["prompt_tokens"] for row in run["requests"]] == [5, 9]
        assert [row["completion_tokens"] for row in run["requests"]] == [3, 5]
    assert compare.differences(served, offline) == []


@pytest.mark.parametrize("shape", ["--request-rate=100", "--concurrency=2"])
def test_offline_answers_every_request_to_its_length(folder: Path, tmp_path: Path, shape: str) -> None:
    out = tmp_path / "run.json"
    flags = [f"--model={folder}", *SMALL, shape, "--num-requests=6", "--device=cpu", "--kv-cache-memory-bytes=8388608"]
    assert main(["bench", "offline", *flags, f"--json={out}"]) == 0
    run = compare.read(out)
    assert run["summary"]["completed"] == 6
    for row in run["requests"]:
        assert len(row["itl_ms"]) == row["completion_tokens"] - 1  # the engine gives one token at a time


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and the one line on stderr."""
    code = main(["bench", *arguments])
    error = capsys.readouterr().err
    assert error.startswith("millstream: ")
    assert error.count("\n") == 1
    return code, error


def test_a_dead_endpoint_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with reserved_port() as port:
        code, error = complaint(capsys, "serve", f"--url=http://127.0.0.1:{port}", "--concurrency=1")
    assert code == 1
    assert "No server answers at http://127.0.0.1" in error
    assert error.endswith(": the connection was refused.\n")


def test_results_that_could_not_be_saved_are_found_before_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    load = ("serve", "--url=http://127.0.0.1:1", "--concurrency=1")
    code, error = complaint(capsys, *load, f"--json={tmp_path / 'a'}", f"--plot={tmp_path / 'a'}")
    assert (code, "give each a file of its own" in error) == (2, True)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # tests run as root, who may write everywhere
    code, error = complaint(capsys, *load, f"--json={tmp_path / 'a'}")
    assert (code, "cannot be written, give another" in error) == (2, True)


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--concurrency=1", "--model=gpt-9"], 1, "does not serve 'gpt-9'; it serves tiny"),
        (["--concurrency=1", "--token-ids=0:5000"], 1, "--token-ids LOW:HIGH"),
        (["--concurrency=1", "--route=chat", "--prompts=ids"], 2, "--prompts ids needs --route completions"),
        (["--request-rate=0"], 2, "--request-rate is 0.0"),
        (["--request-rate=-3"], 2, "--request-rate is -3.0"),
        (["--request-rate=nan"], 2, "--request-rate is nan"),
        (["--request-rate=fast"], 2, "--request-rate"),
        (["--request-rate=1", "--max-connections=0"], 2, "--max-connections is 0"),
        (["--concurrency=1", "--output-tokens=0"], 2, "--output-tokens is '0'"),
        (["--concurrency=1", "--goodput=speed:3"], 2, "--goodput has 'speed:3'"),
        (["--concurrency=1", "--temperature=9"], 2, "--temperature is 9.0"),
        (["--concurrency=1", "--timeout-seconds=0"], 2, "--timeout-seconds is 0.0"),
        (["--concurrency=1", "--json=/nowhere/at/all/a.json"], 2, "there is no folder /nowhere/at/all"),
        (["--trace=/nowhere.jsonl"], 2, "Cannot read the trace /nowhere.jsonl"),
        ([], 2, "Give one of --request-rate"),
    ],
)
def test_bad_flags_are_one_sentence(
    server: ServerThread, capsys: pytest.CaptureFixture[str], flags: list[str], code: int, said: str
) -> None:
    found, error = complaint(capsys, "serve", f"--url={server.url}", *flags)
    assert found == code
    assert said in error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Give a mode"),
        (["offline", "--concurrency=1"], "Give --model"),
        (["offline", "--concurrency=1", "--model=x", "--port=1"], "--port has no effect in `bench offline`"),
    ],
)
def test_a_command_that_cannot_work_is_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    code, error = complaint(capsys, *arguments)
    assert code == 2
    assert said in error


def test_a_request_longer_than_the_model_is_found_before_the_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [f"--model={folder}", "--device=cpu", "--kv-cache-memory-bytes=8388608", "--concurrency=1"]
    code, error = complaint(capsys, "offline", *flags, "--token-ids=0:255", "--input-tokens=3000")
    assert code == 2
    assert "Request 0 has 3000 + 128 tokens; the model takes" in error


def test_requests_that_fail_are_counted_and_the_exit_code_tells_when_none_was_answered(
    server: ServerThread, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.json"
    flags = ["--token-ids=0:255", "--input-tokens=3000", "--concurrency=1", "--num-requests=2", f"--json={out}"]
    assert main(["bench", "serve", f"--url={server.url}", *flags]) == 1
    assert compare.read(out)["summary"]["failed"] == 2
    assert "2 × The endpoint answered 400: " in capsys.readouterr().out


# A shell starts its background jobs with SIGINT ignored, and so all that they start: this test's run may be one.
LIKE_FROM_A_TERMINAL = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("millstream", run_name="__main__", alter_sys=True)
"""


def test_ctrl_c_prints_and_saves_what_was_measured_so_far(server: ServerThread, tmp_path: Path) -> None:
    out = tmp_path / "run.json"

    def answered() -> float:
        return server.metric("vllm:request_success_total", finished_reason="length")

    started = answered()
    flags = [f"--url={server.url}", *SMALL, "--request-rate=20", "--num-requests=20000", f"--json={out}"]
    command = [sys.executable, "-c", LIKE_FROM_A_TERMINAL, "bench", "serve", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        # The probe, and a few measured ones.
        try:
            wait_for(lambda: answered() >= started + 4, "some answers")
            process.send_signal(signal.SIGINT)
            printed, complained = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 130, complained
    assert "Interrupted" in printed
    assert "Traceback" not in complained
    run = compare.read(out)
    assert run["interrupted"] is True
    assert run["summary"]["completed"] >= 1


async def test_an_open_loop_does_not_wait_for_answers_and_counts_its_own_lateness() -> None:
    """Coordinated omission: the second request is due while the first holds the only connection."""
    now = 0.0

    def prepare(request: PlannedRequest) -> PlannedRequest:
        return request

    async def send(_: PlannedRequest, record: RequestRecord) -> None:
        nonlocal now
        now += 5.0  # a server that stalls
        record.chunk_seconds, record.end_seconds = [now], now

    load = LoadGenerator([PlannedRequest(i, 0.0, 1, 1) for i in range(3)], prepare, send, lambda: now)
    await load.run(concurrency=None, max_connections=1)
    assert [record.ttft_seconds for record in load.records] == [5.0, 10.0, 15.0]
    assert [record.client_delay_seconds for record in load.records] == [0.0, 5.0, 10.0]

    now = 0.0
    closed = LoadGenerator([PlannedRequest(i, None, 1, 1) for i in range(3)], prepare, send, lambda: now)
    await closed.run(concurrency=1, max_connections=1)
    assert [record.ttft_seconds for record in closed.records] == [5.0, 5.0, 5.0]  # the closed loop hides the stall


def test_help_lists_bench_and_loads_nothing_heavy() -> None:
    program = (
        "import sys; from millstream.cli import main; main(['--help']); import millstream.commands.bench; "
        "print([name for name in ('torch', 'numpy', 'fastapi', 'tokenizers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ)
    assert re.search(r"^  bench +load an OpenAI endpoint", done.stdout, re.MULTILINE)
    assert done.stdout.splitlines()[-1] == "[]"
