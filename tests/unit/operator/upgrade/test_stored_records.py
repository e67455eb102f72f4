"""What today's operator stored is what the next one makes: an upgrade restarts no pod and announces nothing twice.

records/README.md says what the files are, and when they may be written anew.
"""

from __future__ import annotations

import copy
import functools
import json
import os
from dataclasses import replace
from typing import Any

import pytest

from millstream_operator.api.status import AppliedStrategy
from millstream_operator.catalog.gpu_names import parse_island
from millstream_operator.diagnosis.decisions import DecisionType, journal
from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.inventory.node_kinds import inventory_of
from millstream_operator.kube.diff import APPLIED_ANNOTATION
from millstream_operator.kube.kinds import CONTROLLER_REVISION, DEPLOYMENT, LLM_DEPLOYMENT, POD
from millstream_operator.rendering.revision import controller_revision, read_revision
from millstream_operator.rendering.revision_marks import JOURNALED_ANNOTATION, Failure, read_marks
from millstream_operator.rollout.adoption import with_adoption
from millstream_operator.rollout.outdated import outdated
from millstream_operator.rollout.revisions import pinned
from millstream_operator.rollout.rollout import next_step
from millstream_operator.rollout.same_pods import makes_the_same_pods
from tests.support.fake_cluster import FakeCluster
from tests.support.fake_operator import FakeOperator
from tests.unit.operator.upgrade.stored_clusters import (
    CLUSTERS,
    STORIES,
    inputs_of,
    journal_of,
    owner_of,
    stored_cluster,
)
from tests.unit.operator.upgrade.stored_deployments import STORED, Stored, catalog, write

Manifest = dict[str, Any]
WRITES = bool(os.environ.get("MILLSTREAM_WRITE_GOLDEN"))
ANEW = "under runtime.updatePolicy FollowOperator at once, of all others with the next change of their spec"
RENDERED = ("digest", "objects", "revisionName")
# The fields that are compared, and what an upgrade would do to what runs if one of them was made otherwise.
MEANINGS = {
    "digest": f"it labels the pods and is their template's hash: this would restart pods on upgrade, {ANEW}",
    "inputHash": "every stored record would count as another spec's, so every plan would be made anew: this would "
    "restart pods on upgrade",
    "configHash": f"it names the pods' ConfigMap: this would restart pods on upgrade, {ANEW}",
    "boot.json": "it is the text of an immutable ConfigMap that running pods mount: the upgrade would be refused by "
    "the API server, or, under another name, this would restart pods on upgrade",
    "live.json": "running pods would get another configuration on upgrade",
    "plan": f"another plan would be made for the same spec and facts: this would restart pods on upgrade, {ANEW}",
    "objectNames": "running pods and their clients know the objects by these names: this would restart pods on "
    "upgrade, and leave objects behind",
    "objects": "the object would be written on upgrade; a Deployment's template or a mounted ConfigMap would restart "
    "pods on upgrade",
    "revisionName": "the record's name is a hash of all of it, of the plan's sentences and factsHash too. Alone it "
    "restarts no pod on upgrade, but the same plan would be stored a second time; with another digest it would "
    "restart pods on upgrade",
    "factsHash": "status.plan.factsHash and the name of a new record change. Alone it restarts no pod on upgrade",
}
JOURNALS = {
    "rolled-out": [DecisionType.REPLACING_IN_PLACE],
    "rolled-back": [DecisionType.ROLLED_BACK, DecisionType.REPLACING_IN_PLACE],
    "stopped": [DecisionType.ROLLOUT_STOPPED],
    "replacing-in-place": [DecisionType.REPLACING_IN_PLACE],
    "replacing-in-place-of-auto": [DecisionType.REPLACING_IN_PLACE],
    "adopted": [DecisionType.PLAN_ADOPTED],
    "adopted-and-failed": [DecisionType.ROLLED_BACK, DecisionType.PLAN_ADOPTED],
    "adopted-gpus": [DecisionType.PLAN_ADOPTED],
}
# What `next_step` would announce in this state if the journal did not hold it.
ANNOUNCED = {
    "rolled-back": [DecisionType.ROLLED_BACK],
    "stopped": [DecisionType.ROLLOUT_STOPPED],
    "replacing-in-place": [DecisionType.REPLACING_IN_PLACE],
    "replacing-in-place-of-auto": [DecisionType.REPLACING_IN_PLACE],
}
# Nothing moves there any more, and nothing there depends on what a later runtime can do.
SETTLED = {
    "rolled-out": "registry.example.com/runtime:1",
    "rolled-back": "registry.example.com/runtime:1",
    "stopped": "registry.example.com/runtime:1",
    "adopted": "better",
    "adopted-and-failed": "bad",
}
LATER = "2025-06-01T00:00:00Z"
EVERY_RECORD = pytest.mark.parametrize("name", STORED)


# What is made


@functools.cache
def made(name: str) -> Manifest:
    return STORED[name].make()


@EVERY_RECORD
def test_the_record_is_there(name: str) -> None:
    """And written anew where that is asked for; what an older operator stored is written once."""
    if WRITES:
        if "made" not in STORED[name].content:
            write(STORED[name].path, STORED[name].content | {"made": made(name)})
        write(STORED[name].rendered_path, {field: made(name)[field] for field in RENDERED})
    assert {*STORED[name].content["made"]} == {*MEANINGS, "controllerRevision"}
    assert {*STORED[name].rendered} == {*RENDERED}


@EVERY_RECORD
@pytest.mark.parametrize("field", MEANINGS)
def test_what_is_made_is_what_was_stored(name: str, field: str) -> None:
    """What is rendered for a new plan may differ from what an older operator stored: it is in records/rendered."""
    stored = STORED[name]
    before = stored.rendered[field] if field in RENDERED else stored.content["made"][field]
    now = made(name)[field]
    if field == "objectNames":  # an inspection's Job is named after its content, and no client knows it
        before, now = ([one for one in names if not one.startswith("Job/")] for names in (before, now))
    assert now == before, f"{name}: {field} has changed; {MEANINGS[field]}."


@EVERY_RECORD
def test_what_is_rendered_today_differs_from_what_is_stored_in_resources_alone(name: str) -> None:
    """So a pod that an older operator rendered runs on, and its plan is not outdated."""
    stored = STORED[name]
    before, today = read_revision(stored.revision), read_revision(made(name)["controllerRevision"])
    assert before is not None
    assert today is not None
    assert makes_the_same_pods(before, today), f"{name}: an upgrade would call the plan outdated, {ANEW}"


# The stored record


def reworded(stored: Manifest) -> Manifest:
    """The same plan, by a version that describes plans in other words."""
    record = copy.deepcopy(stored)
    plan = record["data"]["plan"]
    for field in {"summary", "preferred"} & plan.keys():
        plan[field] = f"{plan[field]}, in other words"
    return record


def outdated_now(stored: Stored, record: Manifest) -> Diagnosis | None:
    revision = read_revision(record)
    assert revision is not None
    return outdated(revision, stored.facts, stored.decide, stored.render)


@EVERY_RECORD
def test_a_stored_plan_is_not_outdated_while_the_facts_are_the_same(name: str) -> None:
    found = outdated_now(STORED[name], STORED[name].revision)
    assert found is None, f"{name}: PlanOutdated on upgrade; FollowOperator would restart pods. {found.message}"


@EVERY_RECORD
def test_a_stored_plan_in_other_words_is_not_outdated_either(name: str) -> None:
    assert outdated_now(STORED[name], reworded(STORED[name].revision)) is None


@pytest.mark.parametrize("in_other_words", [False, True])
def test_a_stored_plan_is_outdated_when_a_cheaper_gpu_comes(in_other_words: bool) -> None:
    stored = STORED["gpu-hub-with-cache"]
    record = reworded(stored.revision) if in_other_words else stored.revision
    revision = read_revision(record)
    assert revision is not None
    cheaper = inventory_of([parse_island(catalog(), text) for text in ("L4:1", "T4:1")])
    found = outdated(revision, replace(stored.facts, inventory=cheaper), stored.decide, stored.render)
    assert found is not None
    assert found.reason is Reason.NEW_FACTS


@EVERY_RECORD
def test_a_stored_record_is_what_the_spec_asks_for_and_is_written_back_as_it_is(name: str) -> None:
    """So it is pinned, not planned anew; and a record's data cannot change, so it must survive being read."""
    stored = STORED[name]
    pin = pinned(stored.owner, [stored.revision])
    assert pin is not None, f"{name}: every pod of it would be planned anew on upgrade"
    assert (pin.number, pin.revision.digest) == (1, stored.content["made"]["digest"])
    assert controller_revision(stored.owner, pin.revision, pin.number, pin.marks) == stored.revision


# Stored clusters


@pytest.mark.parametrize("name", STORIES)
async def test_the_stored_cluster_is_there(name: str) -> None:
    if WRITES:
        cluster = await STORIES[name]()
        write(CLUSTERS / f"{name}.json", [live for _, live in sorted(cluster.objects.items())])
    assert [entry["type"] for entry in journal_of(stored_cluster(name))] == JOURNALS[name]


@pytest.mark.parametrize("name", STORIES)
def test_stored_records_and_their_marks_are_written_back_as_they_are(name: str) -> None:
    cluster = stored_cluster(name)
    for record in cluster.all(CONTROLLER_REVISION):
        revision, marks = read_revision(record), read_marks(record)
        assert revision is not None
        again = controller_revision(owner_of(cluster), revision, record["revision"], marks)
        assert _kept(again) == _kept(record)


def _kept(record: Manifest) -> Manifest:
    """Without what the API server adds, and without the hash that `children` adds when it applies."""
    metadata = {key: record["metadata"].get(key) for key in ("name", "namespace", "labels", "ownerReferences")}
    annotations = dict(record["metadata"].get("annotations") or {})
    annotations.pop(APPLIED_ANNOTATION, None)
    return {**record, "metadata": {**metadata, "annotations": annotations}}


def test_every_mark_is_stored_somewhere() -> None:
    records = [record for name in STORIES for record in stored_cluster(name).all(CONTROLLER_REVISION)]
    marks = [read_marks(record) for record in records]
    assert {one.answered for one in marks} == {True, False}
    assert {one.strategy for one in marks} == {None, *AppliedStrategy}
    no_folder = Failure("CheckpointInvalid", "The model folder /models/x does not exist.")
    assert {one.failure for one in marks} == {None, no_folder}


@pytest.mark.parametrize("name", ANNOUNCED)
def test_what_the_journal_holds_is_not_announced_again(name: str) -> None:
    """Records of before the mark: the entry is recognised by its attempt, and the record is not written for it."""
    inputs = inputs_of(stored_cluster(name))
    assert [one.type for one in next_step(replace(inputs, journal=())).decisions] == ANNOUNCED[name]
    step = next_step(inputs)
    assert step.decisions == (), "the journal would get a second entry for the same attempt on upgrade"
    assert step.pin.marks.journaled is None, "the record would be written on upgrade"


@pytest.mark.parametrize("name", ANNOUNCED)
def test_what_a_record_marks_as_announced_needs_no_entry_of_the_journal(name: str) -> None:
    """The journal is bounded, and its words may change."""
    inputs = inputs_of(stored_cluster(name))
    announced = next_step(replace(inputs, journal=()))
    assert announced.pin.marks.journaled == frozenset(map(str, ANNOUNCED[name]))
    again = next_step(replace(inputs, pin=announced.pin, journal=()))
    assert (again.decisions, again.pin.marks) == ((), announced.pin.marks)


@pytest.mark.parametrize("name", [name for name in JOURNALS if name not in ANNOUNCED])
def test_nothing_is_announced_of_a_rollout_that_is_over(name: str) -> None:
    assert next_step(inputs_of(stored_cluster(name))).decisions == ()


@pytest.mark.parametrize("name", ["adopted", "adopted-gpus"])
def test_an_adoption_that_the_journal_holds_is_not_announced_again(name: str) -> None:
    """In the words of before the mark, nothing is written; in today's, the record is marked."""
    cluster = stored_cluster(name)
    records = cluster.all(CONTROLLER_REVISION)
    kept = pinned(owner_of(cluster), records)
    assert kept is not None
    assert with_adoption(kept, records, journal_of(cluster)) == (kept, ())
    same, announced = with_adoption(kept, records, ())
    assert (same, [one.type for one in announced]) == (kept, [DecisionType.PLAN_ADOPTED])
    for record in records:
        record["metadata"]["annotations"][JOURNALED_ANNOTATION] = ""
    kept = pinned(owner_of(cluster), records)
    assert kept is not None
    marked, again = with_adoption(kept, records, journal((), announced, LATER))
    assert marked.marks.journaled == frozenset([str(DecisionType.PLAN_ADOPTED)])
    assert again == ()
    newest = max(records, key=lambda record: int(record["revision"]))
    newest["metadata"]["annotations"] |= marked.marks.annotations()
    assert with_adoption(marked, records, ()) == (marked, ())


@pytest.mark.parametrize("name", SETTLED)
async def test_the_next_operator_restarts_no_pod_and_adds_nothing_to_the_journal(name: str) -> None:
    before = stored_cluster(name)
    operator = FakeOperator(stored_cluster(name), image=SETTLED[name])
    await operator.settle(roll_out=False)
    companions = {("apply", kind) for kind in ("PodDisruptionBudget", "NetworkPolicy")}  # they restart nothing
    assert {*operator.writes} <= {("apply", "LLMDeployment/status")} | companions, "only its words may be other ones"
    assert journal_of(operator.cluster) == journal_of(before)
    assert _running(operator.cluster) == _running(before)
    assert _states(operator.cluster) == _states(before)


def _running(cluster: FakeCluster) -> str:
    """The pods, and what they are made from."""
    return json.dumps([cluster.all(POD), cluster.the(DEPLOYMENT)["spec"]], sort_keys=True)


def _states(cluster: FakeCluster) -> Manifest:
    """The status without its sentences."""
    status = cluster.the(LLM_DEPLOYMENT)["status"]
    return {
        "conditions": {one["type"]: (one["status"], one["reason"]) for one in status["conditions"]},
        "rollout": status["rollout"],
        "model": status["model"],
        "runtime": status["runtime"],
    }
