"""`millstream` as a person and a pod start it: a real process, its exit code, its one line, its termination message."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from millstream.cli import report
from millstream.commands.serve import serve
from millstream_runtime.boot import BootLedger
from millstream_runtime.errors import InvalidConfigError, RuntimeFailure
from millstream_runtime.server.http.sockets import bind
from tests.support.command_line import config_from_command_line
from tests.support.engine_thread import EngineThreads
from tests.support.reserved_port import reserved_port
from tests.support.server_thread import wait_for
from tests.support.tiny_model import write_tiny_model

pytestmark = pytest.mark.deep

MANIFEST = """\
apiVersion: millstream.dev/v1alpha1
kind: LLMDeployment
metadata: {name: support-chat}
spec:
  model: {source: {local: {path: tiny}}}
  accelerator: {type: CPU}
  engine: {maxModelLen: 512, maxNumSeqs: 4}
"""
DEMO_CHAT = Path(__file__).resolve().parents[3] / "models/demo-chat"
SMALL = ("--kv-cache-memory-bytes=8388608", "--device=cpu")


def millstream(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "millstream", *arguments]
    environment = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=cwd, env=environment)


@contextmanager
def serve_process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A serving process and its URL, Ready."""
    command = [sys.executable, "-m", "millstream", "serve", *arguments, "--port=0", *SMALL]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines = []
            for line in process.stderr:
                lines.append(line)
                if found := re.search(r"Ready in .* at (http://\S+)/v1", line):
                    yield process, found[1]
                    break
            else:
                pytest.fail("never Ready:\n" + "".join(lines))
        finally:
            if process.poll() is None:
                process.kill()


def test_help_and_version_need_nothing_heavy() -> None:
    assert "serve" in millstream("--help").stdout
    assert millstream("--version").stdout.startswith("millstream 0.")
    assert "MODEL_FOLDER" in millstream("serve", "--help").stdout
    program = (
        "import sys, millstream.cli; print([m for m in ('torch', 'fastapi', 'pydantic', 'yaml') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        ([], 2, ""),
        (["dance"], 2, "'dance'"),
        (["serve"], 2, "Nothing to serve"),
        (["serve", "x", "--prot=1"], 2, "--prot=1"),
        (["serve", "x", "--model=y"], 2, "not both"),
        (["serve", "no-such-folder"], 1, "no model folder no-such-folder"),
        (["serve", "org/name"], 1, "`millstream fetch --hugging-face org/name --into FOLDER`"),
        (["serve", "no-such.yaml"], 1, "no-such.yaml"),
        (["serve", "--model=/no/such"], 1, "The model folder /no/such does not exist"),
        (["serve", "--model=/x", "--port=70000"], 2, "--port is 70000"),
        (["serve", "--model=/x", "--max-num-seqs=many"], 2, "--max-num-seqs"),
        (["serve", f"--model={DEMO_CHAT}", "--host=999.0.0.1"], 2, "--host 999.0.0.1"),
        (["serve", str(DEMO_CHAT.parent)], 1, "config.json does not exist; give a folder with config.json"),
        (["serve", f"--model={DEMO_CHAT / 'config.json'}"], 1, "config.json is a file; give a folder"),
        (["validate"], 2, "FILE"),
    ],
)
def test_a_bad_command_line_is_one_sentence_and_an_exit_code(
    tmp_path: Path, arguments: list[str], code: int, named: str
) -> None:
    log = tmp_path / "termination-log"
    log.touch()
    extra = ["--port=0"] if arguments[:1] == ["serve"] and not any("port" in flag for flag in arguments) else []
    done = millstream(*arguments, *extra, MILLSTREAM_TERMINATION_LOG=str(log), MILLSTREAM_LOG_LEVEL="warning")
    assert done.returncode == code, done.stderr
    assert named in done.stderr
    if arguments:
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1
        assert done.stderr.startswith("millstream: ")
        assert json.loads(log.read_text())["message"] == done.stderr.removeprefix("millstream: ").strip()


def test_a_busy_port_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    log = tmp_path / "termination-log"
    log.touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        folder = write_tiny_model(tmp_path / "tiny")
        done = millstream("serve", str(folder), f"--port={port}", MILLSTREAM_TERMINATION_LOG=str(log))
    assert done.returncode == 1
    assert done.stderr == (
        f"millstream: Port {port} on 127.0.0.1 is in use by another process; stop it or choose another with --port.\n"
    )
    assert json.loads(log.read_text())["reason"] == "PortInUse"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("damage", "named"),
    [("truncate", "model.safetensors"), ("no config", "config.json"), ("no weights", "safetensors")],
)
def test_a_damaged_checkpoint_is_refused_with_the_file_named(
    tmp_path: Path, damage: str, named: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the engine in this process, which has torch loaded already; the other tests here start their own."""
    folder, log = write_tiny_model(tmp_path / "tiny"), tmp_path / "termination-log"
    log.touch()
    weights = folder / "model.safetensors"
    if damage == "truncate":
        weights.write_bytes(weights.read_bytes()[:5000])
    else:
        (folder / "config.json" if damage == "no config" else weights).unlink()
    monkeypatch.setenv("MILLSTREAM_TERMINATION_LOG", str(log))
    monkeypatch.setenv("MILLSTREAM_LOG_LEVEL", "error")
    handlers = list(logging.getLogger().handlers)
    config = config_from_command_line([str(folder), "--port=0", *SMALL])
    try:
        with pytest.raises(RuntimeFailure) as caught:
            serve(config, bind(config.host, config.port), BootLedger(), EngineThreads(config))
        code = report(caught.value)
    finally:
        logging.getLogger().handlers[:] = handlers
    error_output = capfd.readouterr().err
    assert code == 1
    assert error_output.startswith("millstream: ")
    assert error_output.count("\n") == 1
    assert named in error_output
    assert json.loads(log.read_text())["reason"] == "CheckpointInvalid"


def test_sigterm_finishes_the_stream_and_exits_with_zero(tiny_model: Path) -> None:
    with serve_process(str(tiny_model)) as (process, url):
        body = {"model": "tiny", "prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            lines = (line for line in answer.iter_lines() if line)
            next(lines)
            process.send_signal(signal.SIGTERM)
            wait_for(lambda: httpx.get(f"{url}/ready").json()["phase"] == "Draining", "Draining")
            assert list(lines)[-1] == "data: [DONE]"
        assert process.wait(120) == 0


def test_sigterm_during_the_imports_ends_the_server(tiny_model: Path) -> None:
    """The default action is no action for a container's first process: the pod loaded on, up to its SIGKILL."""
    program = (
        "import os, runpy, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'uvicorn':\n"
        "            os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "sys.argv[0] = 'millstream'\n"
        "runpy.run_module('millstream', run_name='__main__')\n"
    )
    command = [sys.executable, "-c", program, "serve", str(tiny_model), "--port=0", *SMALL]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGTERM, "")


def test_a_second_signal_quits_at_once(tiny_model: Path) -> None:
    with serve_process(str(tiny_model)) as (process, url):
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 503, "Draining")
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 128 + signal.SIGINT


def test_a_log_that_is_not_read_holds_no_server_up(tiny_model: Path) -> None:
    """As behind a pager: the pipe was full after some lines, and the event loop waited in the next one for ever."""
    reader, writer = os.pipe()
    os.write(writer, b"x" * fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096))
    with reserved_port() as port:
        command = [sys.executable, "-m", "millstream", "serve", str(tiny_model), f"--port={port}", *SMALL]
        with subprocess.Popen(command, stderr=writer) as process:
            try:

                def is_ready() -> bool:
                    with suppress(httpx.TransportError):
                        return httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200
                    return False

                wait_for(is_ready, "Ready")
                process.send_signal(signal.SIGTERM)
                assert process.wait(120) == 0
            finally:
                process.kill()
                for end in (reader, writer):
                    os.close(end)


def test_a_manifest_is_served_as_a_pod_would_be_and_flags_win(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "chat.yaml"
    file.write_text(MANIFEST)
    monkeypatch.setenv("MILLSTREAM_MODELS_DIR", str(tiny_model.parent))
    config = config_from_command_line([str(file)])
    assert config.model == str(tiny_model)
    assert (config.served_model_name, config.max_model_len, config.max_num_seqs) == ("support-chat", 512, 4)
    assert (config.host, config.port) == ("127.0.0.1", 8000)
    changed = config_from_command_line([str(file), "--port=9000", "--max-model-len=256", "--host=0.0.0.0"])
    assert (changed.host, changed.port, changed.max_model_len, changed.max_num_seqs) == ("0.0.0.0", 9000, 256, 4)  # noqa: S104
    with serve_process(str(file)) as (_, url):
        assert httpx.get(f"{url}/v1/models").json()["data"][0] | {"created": 0} == {
            "id": "support-chat",
            "object": "model",
            "created": 0,
            "owned_by": "millstream",
            "max_model_len": 512,
        }


@pytest.mark.quick
def test_a_folder_name_is_looked_up_below_the_model_root(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLSTREAM_MODELS_DIR", str(tiny_model.parent))
    config = config_from_command_line(["tiny"])
    assert (config.model, config.served_model_name, config.host) == (str(tiny_model), "tiny", "127.0.0.1")
    assert config_from_command_line([f"--model={tiny_model}"]).host == "0.0.0.0"  # noqa: S104


@pytest.mark.quick
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("maxNumSeqs: 4", "maxNumSequences: 4"), "maxNumSequences"),
        (("maxNumSeqs: 4", "maxNumSeqs: -4"), "maxNumSeqs"),
        (("type: CPU", "type: cpu"), "accelerator.type"),
        (("spec:", "spec: {"), "line"),
        (("kind: LLMDeployment", "kind: Deployment"), "Deployment"),
    ],
)
def test_a_wrong_manifest_is_one_sentence_for_serve_and_for_validate(
    tmp_path: Path, change: tuple[str, str], named: str
) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(MANIFEST)
    bad.write_text(MANIFEST.replace(*change))
    with pytest.raises(RuntimeFailure) as caught:
        config_from_command_line([str(bad)])
    assert named in str(caught.value)
    assert "bad.yaml" in str(caught.value)
    done = millstream("validate", str(good), str(bad))
    assert done.returncode == 1
    assert done.stdout == f"{good}: ok\n"
    assert done.stderr == f"{caught.value}\n"
    assert millstream("validate", str(good)).returncode == 0


@pytest.mark.quick
def test_without_the_operator_package_a_manifest_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the runtime image, which carries folders only."""
    file = tmp_path / "chat.yaml"
    file.write_text(MANIFEST)
    monkeypatch.setitem(sys.modules, "millstream_operator.api.load", None)
    with pytest.raises(InvalidConfigError, match="needs the operator package"):
        config_from_command_line([str(file)])
