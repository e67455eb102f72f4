"""`millstream plan --kubeconfig` corrects predictions as the operator of that cluster does, or says why it does not."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from millstream.cli import main
from millstream_operator.kube.kinds import CONFIG_MAP, LLM_DEPLOYMENT, NODE, POD
from tests.support.fake_cluster import FakeCluster
from tests.support.fake_operator import IMAGE, FakeOperator
from tests.support.measured_models import NAME, SYSTEM, add, gpu_world, plan_of
from tests.unit.operator.facts.test_step_time_calibration import timed
from tests.unit.plan_cli.test_plan_diff import ApiServer

RECORD = f"/api/v1/namespaces/{SYSTEM}/configmaps/{NAME}"


def operator_pod(namespace: str = SYSTEM, **environment: str) -> dict[str, Any]:
    values = {"MILLSTREAM_RUNTIME_IMAGE": IMAGE, "MILLSTREAM_LEASE_NAME": "millstream"} | environment
    env: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in values.items()]
    env.append(
        {"name": "MILLSTREAM_OPERATOR_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}}
    )
    return {
        "metadata": {"name": "millstream-0", "namespace": namespace, "uid": f"u-{namespace}"},
        "spec": {"nodeName": "node-0", "containers": [{"name": "operator", "env": env}]},
        "status": {"phase": "Running"},
    }


class Cluster(ApiServer):
    """The API server of a simulated cluster: what the command reads of it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.objects: dict[str, Any] = {}

    def show(self, cluster: FakeCluster, *pods: dict[str, Any]) -> None:
        self.objects["/api/v1/nodes"] = {"kind": "NodeList", "items": cluster.all(NODE)}
        theirs = [{**pod, "metadata": {**pod["metadata"], "ownerReferences": []}} for pod in cluster.all(POD)]
        self.objects["/api/v1/pods"] = {"kind": "PodList", "items": [*theirs, *pods]}
        self.objects[RECORD] = cluster.get(CONFIG_MAP, NAME, SYSTEM)

    def found(self, path: str) -> Any:
        return self.objects.get(path.split("?")[0])


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("MILLSTREAM_TERMINATION_LOG", str(tmp_path / "none"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    api = Cluster(tmp_path)
    thread = threading.Thread(target=api.http.serve_forever, daemon=True)
    thread.start()
    yield api
    api.http.shutdown()
    api.http.server_close()
    thread.join()


async def measured_cluster() -> tuple[FakeCluster, FakeOperator]:
    """A cluster in which one model has measured, and a second one was planned after it."""
    cluster = gpu_world()
    operator = await timed(cluster)
    add(cluster, "later")
    await operator.settle("later")
    return cluster, operator


def plan(server: Cluster, cluster: FakeCluster, *arguments: str) -> int:
    stored = cluster.the(LLM_DEPLOYMENT, "later")
    metadata = {"name": "later", "namespace": stored["metadata"]["namespace"]}
    file = server.kubeconfig.with_name("later.yaml")
    file.write_text(yaml.safe_dump({**stored, "metadata": metadata, "status": None}))
    return main(["plan", str(file), "--kubeconfig", str(server.kubeconfig), *arguments])


async def test_the_plan_is_that_of_the_operator(server: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, _ = await measured_cluster()
    server.show(cluster, operator_pod())
    assert plan(server, cluster, "-o", "json") == 0
    said = capsys.readouterr()
    shown, made = json.loads(said.out), plan_of(cluster, "later")
    assert made["calibration"]
    for field in ("calibration", "predicted", "memory", "summary"):
        assert shown[field] == made[field], field
    assert f"calibration: 1 measurement in ConfigMap {SYSTEM}/{NAME}" in said.err


async def test_the_table_says_what_was_read_and_the_correction(
    server: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, _ = await measured_cluster()
    server.show(cluster, operator_pod(), operator_pod())
    assert plan(server, cluster) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"calibration 1 measurement in ConfigMap {SYSTEM}/{NAME}" in out
    assert "Corrected by what this image measured on L4-24GB TP1: weights" in out
    assert ", predicted 2.47 GB (× 1.0" in out


@pytest.mark.parametrize(
    ("pods", "is_there", "said"),
    [
        ([], True, "none read: not one operator looks after it (no pod of one was found)"),
        ([operator_pod()], False, f"none: no runtime has measured anything yet (ConfigMap {SYSTEM}/{NAME} does not"),
        (
            [operator_pod(), operator_pod("other")],
            True,
            f"none read: not one operator looks after it ({SYSTEM}/millstream and other/millstream)",
        ),
        ([operator_pod(MILLSTREAM_WATCH_NAMESPACES="elsewhere")], True, "no pod of one was found"),
    ],
)
async def test_why_nothing_is_corrected(
    server: Cluster, capsys: pytest.CaptureFixture[str], pods: list[Any], is_there: bool, said: str
) -> None:
    cluster, _ = await measured_cluster()
    server.show(cluster, *pods)
    server.objects[RECORD] = server.objects[RECORD] if is_there else None
    assert plan(server, cluster) == 0
    shown = capsys.readouterr()
    assert said in shown.err
    assert said in " ".join(shown.out.split())
    assert "Corrected by" not in shown.out


async def test_of_several_operators_the_one_of_the_namespace_counts(
    server: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, _ = await measured_cluster()
    server.show(
        cluster, operator_pod(MILLSTREAM_WATCH_NAMESPACES="a, team"), operator_pod("b", MILLSTREAM_WATCH_NAMESPACES="b")
    )
    assert plan(server, cluster) == 0
    assert "Corrected by" in capsys.readouterr().out


async def test_another_image_has_measured_nothing(server: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, _ = await measured_cluster()
    server.show(cluster, operator_pod())
    assert plan(server, cluster, "--image", "other:1") == 0
    assert "Corrected by" not in capsys.readouterr().out
