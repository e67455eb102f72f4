"""An object that a newer version of the API stored, read by an operator that was downgraded."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from millstream_operator.api.load import ManifestError, loads_manifest, parse
from millstream_operator.api.stored import parse_stored
from millstream_operator.kube.kinds import CONTROLLER_REVISION, DEPLOYMENT, LLM_DEPLOYMENT
from millstream_operator.planning.restart_fields import input_hash, input_hash_of_newer
from tests.support.fake_operator import FakeOperator, served, world
from tests.support.llmdeployments import manifest

Manifest = dict[str, Any]
# `routing` reaches the pods of the newer version, `engine.numericMode` too.
NEWER: Manifest = {"routing": {"mode": "Sticky"}, "engine": {"maxNumSeqs": 8, "numericMode": "Fast"}}


def test_fields_of_a_newer_version_are_left_out_and_named() -> None:
    stored = manifest(**copy.deepcopy(NEWER))
    stored["metadata"]["newOfKubernetes"] = {"a": 1}
    before = copy.deepcopy(stored)
    owner, unknown = parse_stored(stored)
    assert stored == before, "what is in the index is shared"
    assert owner == parse(manifest(engine={"maxNumSeqs": 8}))
    assert sorted(map(str, unknown)) == ["spec.engine.numericMode", "spec.routing"]
    with pytest.raises(ManifestError, match="unknown field"):
        parse(stored)


def test_what_is_invalid_without_them_is_refused_by_what_is_stored() -> None:
    refused: list[Manifest] = [{"model": {"source": {"s3": {"bucket": "b"}}}}, {"routing": {}, "replicas": "two"}]
    for spec in refused:
        with pytest.raises(ManifestError):
            parse_stored(manifest(**spec))
    with pytest.raises(ManifestError, match=r"spec\.model\.source\.s3: unknown field"):
        parse_stored(manifest(model={"source": {"s3": {"bucket": "b"}}}))


def test_a_file_is_read_as_strictly_as_before() -> None:
    text = (
        "apiVersion: millstream.dev/v1alpha1\nkind: LLMDeployment\nmetadata: {name: demo}\n"
        "spec: {model: {source: {local: {path: m}}}, routing: {}}\n"
    )
    with pytest.raises(ManifestError, match=r"spec\.routing: unknown field"):
        loads_manifest(text)


async def test_a_new_object_with_unknown_fields_is_served_and_says_so() -> None:
    operator = FakeOperator(world(manifest(**copy.deepcopy(NEWER))))
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True"
    said = operator.condition("UnknownFields")
    assert (said["status"], said["reason"]) == ("True", "UnknownFields")
    assert "spec.engine.numericMode, spec.routing" in said["message"] or "spec.routing, spec.engine" in said["message"]
    operator.cluster.edit(LLM_DEPLOYMENT, "demo", lambda live: live["spec"].pop("routing"))
    operator.cluster.edit(LLM_DEPLOYMENT, "demo", lambda live: live["spec"]["engine"].pop("numericMode"))
    await operator.settle()
    assert operator.condition("UnknownFields") == {}


async def test_a_downgrade_keeps_the_pods_that_the_newer_operator_rendered() -> None:
    """Its hash counted the new fields; the spec says the same, so nothing is planned anew."""
    operator = await served(manifest(engine={"maxNumSeqs": 8}))
    cluster = operator.cluster
    owner, unknown = parse_stored(manifest(**copy.deepcopy(NEWER)))
    newer = input_hash_of_newer(owner, unknown)
    assert newer != input_hash(owner)
    (record,) = cluster.all(CONTROLLER_REVISION)
    written = copy.deepcopy(record)
    written["data"]["inputHash"] = newer  # as the newer operator wrote it
    cluster.objects["ControllerRevision", record["metadata"]["namespace"], record["metadata"]["name"]] = written
    cluster.edit(LLM_DEPLOYMENT, "demo", lambda live: live["spec"].update(copy.deepcopy(NEWER)))
    before = cluster.the(DEPLOYMENT)["spec"]
    downgraded = FakeOperator(cluster, image="registry.example.com/runtime:0")
    await downgraded.settle()
    assert cluster.the(DEPLOYMENT)["spec"] == before
    assert len(cluster.all(CONTROLLER_REVISION)) == 1
    assert downgraded.condition("UnknownFields")["status"] == "True"
