"""kubectl and helm, run against the demo's cluster."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_START_SECONDS = 20.0


class DemoError(Exception):
    """The demo cannot go on. `str()` is one sentence with what to do; no traceback follows it."""


class Cluster:
    """One cluster, by its kubeconfig; `tools` is the folder where `python3 -m hack.cluster` puts kubectl and helm."""

    def __init__(self, kubeconfig: Path, tools: Path) -> None:
        if not kubeconfig.is_file():
            raise DemoError(f"{kubeconfig} is missing: run `make cluster-up`, or name another with --kubeconfig.")
        self._env = os.environ | {"KUBECONFIG": str(kubeconfig), "PATH": f"{tools}:{os.environ.get('PATH', '')}"}
        for tool in ("kubectl", "helm"):
            if shutil.which(tool, path=self._env["PATH"]) is None:
                raise DemoError(f"{tool} is not installed: `make cluster-up` puts it in .tools/bin.")

    def run(self, *command: str, what: str) -> str:
        """Run to the end and return stdout; `what` completes "Could not …" in the error."""
        done = subprocess.run(command, env=self._env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise DemoError(f"Could not {what}: {_last_words(done.stderr or done.stdout)}")
        return done.stdout

    def get(self, *arguments: str) -> dict[str, Any]:
        """`kubectl get … -o json`, parsed."""
        text = self.run("kubectl", "get", *arguments, "-o", "json", what=f"read {' '.join(arguments[:2])}")
        parsed: dict[str, Any] = json.loads(text)
        return parsed

    @contextmanager
    def port_forward(self, namespace: str, target: str, port: int) -> Iterator[int]:
        """A local port that leads to a port of `target`, such as `service/demo`, for the length of the block."""
        command = ["kubectl", "port-forward", "--namespace", namespace, "--address", "127.0.0.1", target, f":{port}"]
        process = subprocess.Popen(
            command, env=self._env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            yield _forwarded_port(process)
        finally:
            process.terminate()
            process.wait(_START_SECONDS)


def _forwarded_port(process: subprocess.Popen[str]) -> int:
    """kubectl says `Forwarding from 127.0.0.1:40123 -> 8000` once it listens, or ends."""
    assert process.stdout is not None  # noqa: S101 - Popen was given a pipe
    assert process.stderr is not None  # noqa: S101
    line = process.stdout.readline()
    if "Forwarding from" not in line:
        process.wait(_START_SECONDS)
        raise DemoError(f"Could not forward a port to the Service: {_last_words(process.stderr.read())}")
    return int(line.split("->")[0].strip().rpartition(":")[2])


def _last_words(text: str) -> str:
    return " ".join(text.split())[-600:] or "it said nothing."
