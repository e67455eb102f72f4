"""`millstream fetch` and `millstream inspect` as a pod starts them: exit code, lines, termination message."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from millstream.arguments import CommandLineParser
from millstream.source_arguments import add_source_arguments, source_from
from millstream_runtime.sources.image_source import ImageSource
from tests.support.local_hub import COMMIT, LocalCDN, LocalHub
from tests.support.local_registry import LocalRegistry
from tests.support.local_web import Fault
from tests.support.model_files import SHARDS, WANTED, model_files

pytestmark = pytest.mark.deep

SECRET = "hf_a-secret-token"


class Command:
    """Runs `millstream …` against the local hub, with a termination log as in a pod."""

    def __init__(self, folder: Path, hub: LocalHub) -> None:
        self.log = folder / "termination-log"
        self.into = folder / "tiny"
        self.environment = {**os.environ, "HF_ENDPOINT": hub.url, "MILLSTREAM_TERMINATION_LOG": str(self.log)}
        self.environment.pop("HF_TOKEN", None)
        self.environment["HF_HUB_OFFLINE"] = "1"  # as in the runtime image, where it is meant for the server
        self.log.touch()

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "millstream", *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=self.environment)

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        with self.start(*arguments) as process:
            stdout, stderr = process.communicate(timeout=240)
        return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)

    def fetch(self) -> tuple[str, ...]:
        return ("fetch", "--hugging-face=org/tiny", f"--into={self.into}")

    def message(self) -> dict[str, object]:
        found = json.loads(self.log.read_text())
        assert isinstance(found, dict)
        return found


@pytest.fixture
def command(tmp_path: Path, hub: LocalHub) -> Command:
    return Command(tmp_path, hub)


def test_fetch_says_one_json_line_and_leaves_it_as_termination_message(command: Command) -> None:
    done = command(*command.fetch())
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout)
    assert line == command.message()
    assert line["event"] == "fetched"
    assert line["revision"] == COMMIT
    assert line["downloaded_bytes"] == line["total_bytes"]
    assert "is complete: 7 files" in done.stderr
    again = command(*command.fetch())
    assert (json.loads(again.stdout)["kept"], json.loads(again.stdout)["downloaded_bytes"]) == (True, 0)


def test_a_failure_is_one_sentence_a_reason_and_an_exit_code(command: Command, hub: LocalHub, tmp_path: Path) -> None:
    hub.token = SECRET
    done = command(*command.fetch())
    assert done.returncode == 1
    assert command.message()["reason"] == "DownloadUnauthorized"
    assert done.stderr == f"millstream: {command.message()['message']}\n"
    (tmp_path / "token").write_text(SECRET + "\n")
    done = command(*command.fetch(), f"--token-file={tmp_path / 'token'}")
    assert done.returncode == 0
    assert SECRET not in done.stdout + done.stderr


@pytest.mark.parametrize("what", ["fetch", "inspect"])
def test_each_wait_for_a_hub_that_does_not_answer_is_a_line(command: Command, hub: LocalHub, what: str) -> None:
    """Without network the waits take half a minute."""
    hub.faults.append(Fault("/api/models", times=9, status=503))
    arguments = command.fetch() if what == "fetch" else ("inspect", "--hugging-face=org/tiny")
    done = command(*arguments, "--retries=2")
    assert done.returncode == 1
    waited, failed = done.stderr.splitlines()
    assert "the hub that HF_ENDPOINT names answered HTTP 503; attempt 2 of 2 in" in waited
    assert failed == f"millstream: {command.message()['message']}"


def test_killed_in_the_middle_then_run_again(command: Command, hub: LocalHub, cdn: LocalCDN) -> None:
    hold = threading.Event()
    cdn.faults.append(Fault("/blobs/", hold=hold))
    with command.start(*command.fetch(), "--parallel=1") as process:
        assert cdn.sent_half.wait(120)
        partial = command.into / ".millstream-partial"
        while not any(path.stat().st_size > 400_000 for path in partial.glob("*.part")):
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
    hold.set()
    kept_bytes = max(path.stat().st_size for path in partial.glob("*.part"))
    assert not any(path.name in WANTED for path in command.into.iterdir())
    done = command(*command.fetch())
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout)
    assert line["downloaded_bytes"] <= line["total_bytes"] - kept_bytes
    assert all((command.into / name).read_bytes() == hub.files[name] for name in WANTED)


def test_two_processes_at_once_download_once(command: Command, hub: LocalHub, cdn: LocalCDN) -> None:
    hold = threading.Event()
    cdn.faults.append(Fault("/blobs/", hold=hold))
    with command.start(*command.fetch()) as first:
        assert cdn.sent_half.wait(120)
        with command.start(*command.fetch()) as second:
            assert second.stderr is not None
            assert "waiting for process" in second.stderr.readline()
            hold.set()
            outputs = [process.communicate(timeout=240)[0] for process in (first, second)]
    assert [json.loads(output)["kept"] for output in outputs] == [False, True]
    assert cdn.sent("/blobs/") == sum(len(hub.files[name]) for name in SHARDS)


def test_a_complete_folder_needs_no_hub_and_no_write(command: Command) -> None:
    command(*command.fetch())
    before = {path: path.stat().st_mtime_ns for path in (command.into, *command.into.iterdir())}
    command.environment["HF_ENDPOINT"] = "http://127.0.0.1:9"
    done = command(*command.fetch())
    assert done.returncode == 0, done.stderr
    assert {path: path.stat().st_mtime_ns for path in (command.into, *command.into.iterdir())} == before


def test_sigterm_lets_go_of_the_folder(command: Command, cdn: LocalCDN) -> None:
    hold = threading.Event()
    cdn.faults.append(Fault("/blobs/", times=2, hold=hold))
    with command.start(*command.fetch()) as process:
        assert cdn.sent_half.wait(120)
        process.terminate()
        process.communicate(timeout=120)
    hold.set()
    assert process.returncode == 128 + signal.SIGTERM
    assert not (command.into / ".millstream-lock").exists()


def test_inspect_writes_the_same_line_twice(command: Command, tmp_path: Path) -> None:
    log = tmp_path / "another-log"
    done = command("inspect", "--hugging-face=org/tiny", f"--termination-message-path={log}")
    assert done.returncode == 0, done.stderr
    shape = json.loads(done.stdout)
    assert json.loads(log.read_text()) == shape
    assert (shape["revision"], shape["weights"]["files"]) == (COMMIT, len(SHARDS))
    assert command.log.read_text() == ""


def test_inspect_failure_goes_to_the_path_that_was_given(command: Command, tmp_path: Path) -> None:
    log = tmp_path / "another-log"
    done = command("inspect", f"--path={tmp_path / 'none'}", f"--termination-message-path={log}")
    assert done.returncode == 1
    assert json.loads(log.read_text())["reason"] == "CheckpointInvalid"


def test_an_artifact_from_a_registry(command: Command, registry: LocalRegistry) -> None:
    registry.artifact("1", model_files())
    done = command("fetch", f"--image={registry.host}/org/tiny:1", f"--into={command.into}")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in command.into.iterdir() if not path.name.startswith(".")} == WANTED


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["fetch", "--into=x"], "--hugging-face --image is required"),
        (["fetch", "--hugging-face=a/b"], "--into"),
        (["fetch", "--hugging-face=a/b", "--image=c", "--into=x"], "not allowed with"),
        (["fetch", "--image=c", "--revision=main", "--into=x"], "--revision and --token-file go with"),
        (["fetch", "--hugging-face=a/b", "--plain-http", "--into=x"], "go with --image"),
        (["fetch", "--hugging-face=a/b", "--token=hf_x", "--into=x"], "--token"),
        (["fetch", "--hugging-face=a/b", "--parallel=0", "--into=x"], "--parallel is 0"),
        (["fetch", "--hugging-face=a/b", "--token-file=/no/such", "--into=x"], "cannot be read"),
        (["inspect"], "--hugging-face, --image, --path, or --config alone"),
        (["inspect", "--image=A B"], "--image is 'A B'"),
    ],
)
def test_a_bad_command_line_is_one_sentence(command: Command, arguments: list[str], named: str) -> None:
    done = command(*arguments)
    assert done.returncode == 2, done.stderr
    assert named in done.stderr
    assert done.stderr.count("\n") == 1
    assert command.message()["reason"] == "InvalidConfig"


def test_a_registry_without_tls_is_named_in_the_environment() -> None:
    """A pod's template has no place for a flag; only the registry that is named is asked without TLS."""
    parser = CommandLineParser(prog="fetch")
    add_source_arguments(parser)
    environment = {"PLAIN_HTTP_REGISTRIES": "registry:5000, other:80"}

    def url(reference: str) -> str:
        source = source_from(parser.parse_args([f"--image={reference}"]), environment)
        assert isinstance(source, ImageSource)
        return source.base_url

    assert url("registry:5000/org/name:1") == "http://registry:5000/v2/org/name"
    assert url("registry.example.com/org/name:1").startswith("https://")


def test_help_lists_the_verbs_and_loads_nothing_heavy(command: Command) -> None:
    assert {"fetch", "inspect"} <= set(command("--help").stdout.split())
    assert "--token-file" in command("fetch", "--help").stdout
    assert "--path" in command("inspect", "--help").stdout
    program = (
        "import sys, millstream.commands.fetch, millstream.commands.inspect\n"
        "print([m for m in ('torch', 'numpy', 'pydantic', 'yaml', 'httpx', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
