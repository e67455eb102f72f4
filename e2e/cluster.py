"""kubectl and helm against one cluster, and waiting for what should become true."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from e2e.guard import Guard
from hack.cluster.kind_config import MARKER

Object = dict[str, Any]
T = TypeVar("T")

POLL_SECONDS = 0.25
_COMMAND_TIMEOUT_SECONDS = 200.0


class Cluster:
    """One cluster by its kubeconfig. `tools` comes first in PATH, so the pinned kubectl and helm are used.

    `guard` refuses commands that touch what all tests share, once `read_kinds` has told it the kinds.
    """

    def __init__(self, kubeconfig: Path, tools: Path, guard: Guard | None = None) -> None:
        self.guard = guard or Guard()
        self._env = os.environ | {"KUBECONFIG": str(kubeconfig), "PATH": f"{tools}:{os.environ.get('PATH', '')}"}
        missing = [tool for tool in ("kubectl", "helm") if shutil.which(tool, path=self._env["PATH"]) is None]
        if missing:
            raise FileNotFoundError(f"{' and '.join(missing)} not found: `make cluster-up` puts them in .tools/bin")

    def run(self, *command: str, stdin: str | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run kubectl or helm; with `check`, a failure raises AssertionError with what it said.

        Raises:
            SharedThingError: it touches what all tests share, and the test has no mark for that.
        """
        self.guard.check(command, stdin)
        done = subprocess.run(
            command,
            env=self._env,
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=_COMMAND_TIMEOUT_SECONDS,
        )
        if check:
            assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
        return done

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """stdout of a kubectl command that must work."""
        return self.run("kubectl", *arguments, stdin=stdin).stdout

    def refused(self, *arguments: str, stdin: str | None = None) -> str:
        """stderr of a kubectl command that must be refused."""
        done = self.run("kubectl", *arguments, stdin=stdin, check=False)
        assert done.returncode != 0, f"kubectl {' '.join(arguments)} was not refused: {done.stdout}"
        return done.stderr

    def read_kinds(self) -> None:
        """Tell the guard which kinds have no namespace."""
        table = self.kubectl("api-resources", "--namespaced=false", "--no-headers")
        self.guard.cluster_scoped = cluster_scoped_kinds(table)

    def get(self, *arguments: str) -> Object:
        """`kubectl get … -o json`, parsed."""
        found: Object = json.loads(self.kubectl("get", *arguments, "-o", "json"))
        return found

    def items(self, *arguments: str) -> list[Object]:
        """The items of a list."""
        items: list[Object] = self.get(*arguments)["items"]
        return items

    def find(self, *arguments: str) -> Object | None:
        """An object, or None when there is none of that name."""
        text = self.kubectl("get", *arguments, "--ignore-not-found", "-o", "json")
        return json.loads(text) if text.strip() else None

    def apply(self, namespace: str, *objects: Object) -> None:
        """`kubectl apply`, with kubectl's own strict validation."""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        self.kubectl("apply", "-n", namespace, "-f", "-", stdin=text)

    def wait_condition(self, kind: str, name: str, condition: str, *query: str, timeout_seconds: float = 180.0) -> None:
        """Wait until the object has the condition with status True.

        Not `kubectl wait`: it fails at once on an object that is not there yet, or whose conditions are null as those
        of a CRD are until the API server has first looked at it.
        """

        def holds(found: Object | None) -> bool:
            conditions = ((found or {}).get("status") or {}).get("conditions") or []
            return any(one["type"] == condition and one["status"] == "True" for one in conditions)

        what = f"{kind}/{name} {condition}"
        eventually(lambda: self.find(kind, name, *query), holds, what=what, timeout_seconds=timeout_seconds)

    @contextmanager
    def port_forward(self, namespace: str, target: str, port: int) -> Iterator[int]:
        """A local port that leads to `target`, such as `service/demo`, for the length of the block."""
        self.guard.check(("kubectl", "port-forward", "-n", namespace, target))
        process = subprocess.Popen(
            ["kubectl", "port-forward", "-n", namespace, "--address", "127.0.0.1", target, f":{port}"],
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout
        assert process.stderr
        try:
            line = process.stdout.readline()
            assert "Forwarding from" in line, process.stderr.read()
            yield int(line.split("->")[0].strip().rpartition(":")[2])
        finally:
            process.terminate()
            process.communicate(timeout=20)


def cluster_scoped_kinds(table: str) -> dict[str, str]:
    """Every name of a kind that kubectl takes, in small letters, from the lines of `kubectl api-resources`.

    A line has the columns name, short names (may be empty), API version, namespaced, kind.
    """
    kinds: dict[str, str] = {}
    for line in table.splitlines():
        plural, *short_names, version, _, kind = line.split()
        group = version.partition("/")[0] if "/" in version else ""
        names = {plural, kind.lower(), *(name for names in short_names for name in names.split(","))}
        kinds |= dict.fromkeys(names | {f"{name}.{group}" for name in (plural, kind.lower()) if group}, kind)
    return kinds


def refusal_of(cluster: Cluster) -> str:
    """Why the tests must not run there; empty for a cluster that carries the marker of `make cluster-up`."""
    namespace, name = MARKER
    done = cluster.run("kubectl", "get", "configmap", name, "-n", namespace, "--ignore-not-found", check=False)
    if done.returncode:
        return f"the cluster cannot be asked: {' '.join(done.stderr.split())[-300:]}"
    if done.stdout.strip():
        return ""
    return (
        "this cluster was not made for tests, which replace its Millstream, its CRD and every LLMDeployment: run `make "
        f"cluster-up`, or allow it with `kubectl create configmap {name} -n {namespace}`."
    )


def eventually(look: Callable[[], T], holds: Callable[[T], bool], *, what: str, timeout_seconds: float = 180.0) -> T:
    """Look again until it holds; AssertionError with the last thing seen when it does not in time."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        seen = look()
        if holds(seen):
            return seen
        assert time.monotonic() < deadline, f"not {what} after {timeout_seconds:.0f} s; last seen: {_short(seen)}"
        time.sleep(POLL_SECONDS)


def _short(seen: object) -> str:
    text = json.dumps(seen, default=str) if isinstance(seen, dict | list) else str(seen)
    return text if len(text) < 3000 else f"{text[:3000]}…"
