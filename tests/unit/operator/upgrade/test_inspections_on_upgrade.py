"""An upgrade inspects nothing again: the records of inspections are found by the keys that an older operator wrote."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from millstream_operator.kube.kinds import JOB
from millstream_operator.rendering.inspect_job import Subject, inspection_key
from tests.support.fake_operator import FakeOperator, respec, served
from tests.support.inspected_models import DIGEST, TOKEN, Manifest, hub, inspections, model
from tests.support.llmdeployments import deployment, manifest

ENV = [{"name": "HF_ENDPOINT", "value": "https://hub.invalid"}]
POD = {"podTemplate": {"spec": {"containers": [{"name": "runtime", "env": ENV}], "imagePullSecrets": [{"name": "a"}]}}}
# Labels of ConfigMaps in clusters, as the operator of 2026-11-29 wrote them: never write one anew.
KEYS: list[tuple[str, Manifest]] = [
    ("c949095032", {"model": hub()}),
    ("c949095032", {"model": hub(**TOKEN)}),
    ("c949095032", {"model": hub(), **POD}),
    ("c949095032", {"model": hub(), "runtime": {"image": "registry.invalid/another:1"}}),
    ("ec3ce55f6b", {"model": hub(revision="v2")}),
    ("cb1c73345f", {"model": model(image={"reference": f"registry.invalid/org/name@{DIGEST}"})}),
    ("996852b3c3", {"model": model(image={"reference": "registry.invalid/org/name:1", "pullPolicy": "Always"})}),
    ("dff608b7d9", {"model": model(persistentVolumeClaim={"claimName": "models", "path": "small"})}),
    ("4ee06a2e70", {"model": model(local={"path": "demo-chat"}), "runtime": {"image": "registry.invalid/another:1"}}),
    ("3e27c9c278", {"model": hub() | {"configMapRef": {"name": "shape", "key": "config.json"}}}),
]


@pytest.mark.parametrize(("key", "spec"), KEYS)
def test_the_key_of_a_record_is_that_of_the_stored_one(key: str, spec: Manifest) -> None:
    owner = deployment(**spec)
    assert inspection_key(owner, Subject(owner.spec.model.source, owner.spec.model.config_map_ref)) == key


async def test_a_record_of_before_answers_whatever_the_way_to_the_model_is_now() -> None:
    """Sharing has a key of its own; an object's own record is found without it."""
    operator = await served(manifest(model=hub()))
    (record,) = inspections(operator.cluster)
    assert record["metadata"]["name"] == "demo-ic949095032"
    respec(operator.cluster, **copy.deepcopy(POD), runtime={"image": "registry.invalid/another:1"})
    upgraded: Any = FakeOperator(operator.cluster, image="registry.example.com/runtime:2")
    await upgraded.settle(inspected="no inspection is started")
    assert operator.cluster.all(JOB) == []
    assert ("apply", "Job") not in upgraded.writes
