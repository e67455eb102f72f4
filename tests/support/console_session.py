"""Types the commands of a page into a shell, in a copy of the checkout: real processes, and servers that stay.

The copy has links to what the checkout holds, so what a command writes does not land there. A page's server listens on
a port of its own in place of 8000 or 9000, because other tests run at the same time; the pages' addresses follow.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from tests.support.console_blocks import ROOT, Block, Command
from tests.support.reserved_port import reserved_port

COMMAND_SECONDS = 600.0  # on a machine that does much else; the longest takes ten
DOCUMENTED_PORTS = ("8000", "9000")
_SERVE = re.compile(r"^(\.venv/bin/)?millstream serve\b")
_COMMENT = re.compile(r"\s+#\s.*$")


class ConsoleSession:
    """One reader's terminal. `run` raises AssertionError with the command and its output."""

    def __init__(self, folder: Path, ports: dict[str, str]) -> None:
        self._folder, self._ports = folder, ports
        self._servers: dict[str, subprocess.Popen[str]] = {}  # by the port that they listen on
        scripts = str(Path(sys.executable).parent)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("MILLSTREAM_", "HF_"))}
        self._environment = kept | {
            "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(folder),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "2",
        }
        link_checkout(folder)

    def run(self, block: Block) -> None:
        """Run the commands of a block. A server is waited for, and stays until another one wants its port."""
        for command in block.commands:
            if _SERVE.match(command.text):
                self._start_server(block, command)
            else:
                self._run(block, command)

    def stop_servers(self) -> None:
        """Stop each server as Ctrl-C does."""
        for port in list(self._servers):
            self._stop(port)

    def kill(self) -> None:
        """End the servers that a failed test left."""
        for server in self._servers.values():
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()

    def _stop(self, port: str) -> None:
        """It must end by itself, without a traceback."""
        server = self._servers[port]
        os.killpg(server.pid, signal.SIGINT)
        server.wait(timeout=COMMAND_SECONDS)
        del self._servers[port]
        output = self._log(port).read_text()
        assert "Traceback" not in output, output
        assert server.returncode in (0, 130), (server.returncode, output)

    def _run(self, block: Block, command: Command) -> None:
        ended = subprocess.run(
            ["bash", "-o", "pipefail", "-c", self._with_ports(command.text)],
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )
        what = f"{block.place}: {command.text}\n{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}"
        assert ended.returncode == 0, f"exit code {ended.returncode} of {what}"
        if command.output:
            assert command.output[0] in ended.stdout.splitlines(), f"no line {command.output[0]!r} in {what}"

    def _start_server(self, block: Block, command: Command) -> None:
        text = _COMMENT.sub("", command.text)
        if "--port" not in text:
            text = f"{text} --port {DOCUMENTED_PORTS[0]}"
        port = self._ports[re.findall(r"--port[ =](\d+)", text)[0]]
        if port in self._servers:
            self._stop(port)
        log = self._log(port)
        with log.open("w") as output:
            server = subprocess.Popen(
                ["bash", "-c", f"exec {self._with_ports(text)}"],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        self._servers[port] = server
        deadline = time.monotonic() + COMMAND_SECONDS
        while not is_ready(port):
            is_late = time.monotonic() > deadline
            if is_late or server.poll() is not None:
                raise AssertionError(f"{block.place}: {command.text} did not get ready\n{log.read_text()[-2000:]}")
            time.sleep(0.5)

    def _log(self, port: str) -> Path:
        return self._folder / f"server-{port}.log"

    def _with_ports(self, text: str) -> str:
        for documented, port in self._ports.items():
            text = re.sub(rf"(127\.0\.0\.1:|localhost:|--port[ =]){documented}\b", rf"\g<1>{port}", text)
        return text


def is_ready(port: str) -> bool:
    """Whether the server says that it answers."""
    connection = HTTPConnection("127.0.0.1", int(port), timeout=10)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def link_checkout(folder: Path) -> None:
    """Link what the checkout has at its top; of the folders that a page may write to, what is in them."""
    for entry in sorted(ROOT.iterdir()):
        if entry.name in {".git", "build", "dist"}:
            continue
        if entry.name != "models":
            (folder / entry.name).symlink_to(entry)
            continue
        (folder / entry.name).mkdir()
        for part in entry.iterdir():
            (folder / entry.name / part.name).symlink_to(part)


@contextmanager
def console_session(folder: Path) -> Iterator[ConsoleSession]:
    """Yield a terminal in a new copy of the checkout; at the end its server is stopped."""
    with ExitStack() as stack:
        ports = {documented: str(stack.enter_context(reserved_port())) for documented in DOCUMENTED_PORTS}
        session = ConsoleSession(folder, ports)
        stack.callback(session.kill)
        yield session
        session.stop_servers()
