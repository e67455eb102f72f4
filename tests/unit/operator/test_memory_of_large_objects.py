"""The operator's memory with the largest objects that could ever be stored: it stays under half of the chart's limit.

The objects are those that versions before the limits on size accepted: texts of 384 KiB in each, with four revisions of
which each has other texts. One real process, and an API server in memory.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from millstream_operator.api.load import parse
from millstream_operator.kube.kinds import CONTROLLER_REVISION, DEPLOYMENT, LLM_DEPLOYMENT
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.plan import Plan, PlanDefaults
from millstream_operator.planning.planner import decide
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.revision import controller_revision, render_revision
from millstream_operator.rendering.revision_marks import Marks
from tests.support.fake_api_server import FakeApiServer, write_kubeconfig
from tests.support.helm_chart import CHART
from tests.support.reserved_port import reserved_port
from tests.unit.operator.leadership.test_operator_process import Replica, eventually

pytestmark = pytest.mark.deep

Manifest = dict[str, Any]
NUM_OBJECTS, NUM_REVISIONS = 300, 4
TEXT_CHARACTERS = 4096
DEFAULTS = PlanDefaults("registry/runtime:1")


def spec_with_texts(mark: str) -> Manifest:
    def text(part: str) -> str:
        return f"{mark}-{part}-".ljust(TEXT_CHARACTERS, "x")

    env = [{"name": f"V{number}", "value": text(f"v{number}")} for number in range(64)]
    annotations = {f"a{number}": text(f"a{number}") for number in range(32)}
    return {
        "model": {"servedName": "demo", "source": {"local": {"path": "demo-chat"}}},
        "accelerator": {"type": "CPU"},
        "replicas": 0,
        "podTemplate": {
            "metadata": {"annotations": annotations},
            "spec": {"containers": [{"name": "runtime", "env": env}]},
        },
    }


def put_with_revisions(api: FakeApiServer, name: str) -> None:
    """Store an LLMDeployment, and what earlier edits of it left."""
    stored = api.put(
        LLM_DEPLOYMENT,
        {
            "apiVersion": LLM_DEPLOYMENT.api_version,
            "kind": LLM_DEPLOYMENT.kind,
            "metadata": {"name": name, "namespace": "team"},
            "spec": spec_with_texts(f"{name}-{NUM_REVISIONS}"),
        },
    )
    for number in range(1, NUM_REVISIONS + 1):
        newest = number == NUM_REVISIONS
        before = stored if newest else {**stored, "spec": spec_with_texts(f"{name}-{number}")}
        owner = parse(copy.copy(before))
        plan = decide(owner, DEFAULTS, Facts())
        assert isinstance(plan, Plan)
        revision = render_revision(owner, plan, PodDefaults())
        api.put(CONTROLLER_REVISION, controller_revision(owner, revision, number, Marks(answered=newest)))


def memory_limit_bytes() -> int:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    limit = values["operator"]["resources"]["limits"]["memory"]
    assert limit.endswith("Mi")
    return int(limit.removesuffix("Mi")) << 20


def most_resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[tuple[FakeApiServer, Path]]:
    server = FakeApiServer()
    runner, url = await server.start()
    yield server, write_kubeconfig(tmp_path / "kubeconfig", url)
    await runner.cleanup()


async def test_the_largest_objects_take_less_than_half_of_the_memory_limit(
    api: tuple[FakeApiServer, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.unit.operator.leadership.test_operator_process.PATIENCE_SECONDS", 1200.0)
    server, kubeconfig = api
    names = {f"m{number:03}" for number in range(NUM_OBJECTS)}
    for name in sorted(names):
        put_with_revisions(server, name)
    with reserved_port() as port:
        operator = await Replica(kubeconfig, port).start()
        try:
            await eventually(lambda: server.names(DEPLOYMENT) == names, "a Deployment of each: what is stored serves")
            await eventually(lambda: len(server.names(CONTROLLER_REVISION)) == NUM_OBJECTS, "the history is pruned")
            most = most_resident_bytes(operator.process.pid)
            print(f"{most / 2**20:.0f} MiB at most, of {memory_limit_bytes() / 2**20:.0f}")
        finally:
            operator.process.kill()
            await operator.process.wait()
    assert most < memory_limit_bytes() // 2
