"""Every field works or is rejected: each one is changed alone, and something that is applied must change with it.

The spec's types are walked, so a field that is added to them without an entry in `CHANGES` fails here. What counts
is what is applied to the cluster (the Deployment, the Service, …), not the revision, which has a hash of the whole
spec and would change with a field that is not read.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.load import ManifestError, parse
from millstream_operator.api.spec import LLMDeploymentSpec
from millstream_operator.catalog.gpu import load_catalog
from millstream_operator.catalog.gpu_names import parse_island
from millstream_operator.catalog.known_models import known_shape
from millstream_operator.catalog.read_shape import read_shape
from millstream_operator.diagnosis.plan_refused import PlanRefused
from millstream_operator.facts.inspection import subjects
from millstream_operator.inventory.node_kinds import inventory_of
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.inspected import Inspected
from millstream_operator.planning.plan import Plan, PlanDefaults
from millstream_operator.planning.planner import decide
from millstream_operator.planning.restart_fields import input_hash
from millstream_operator.rendering.companions import (
    POD_MONITOR,
    PROMETHEUS_RULE,
    SCALED_OBJECT,
    Autoscaler,
    CompanionDefaults,
    autoscaler,
    monitors,
)
from millstream_operator.rendering.inspect_job import inspect_job
from millstream_operator.rendering.objects import objects
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.preparation_job import Step, StepKind, preparation_job, steps_of
from millstream_operator.rendering.revision import controller_revision, render_revision
from millstream_operator.rendering.tuning_job import DraftPair, tuning_job, tuning_key
from millstream_operator.rollout.pinning import Pinning
from tests.support.fake_operator import CONFIG as CONFIG_JSON
from tests.support.field_changes import (
    CHANGES,
    EVERY_POD,
    SAYS_THE_DEFAULT,
    Adopts,
    Changes,
    Decides,
    NotYet,
    Planned,
    Refused,
)
from tests.support.llmdeployments import full_manifest, manifest
from tests.support.pinned_plans import NoFacts, choose, chosen_pin
from tests.support.spec_fields import leaves, place

Manifest = dict[str, Any]
Objects = dict[str, Manifest]
LONG = {**CONFIG_JSON, "max_position_embeddings": 1 << 17}  # a model that allows what the fields ask for
DEFAULTS = PlanDefaults(runtime_image="registry.example.com/default:1")
# A cluster of three kinds of nodes, and a model that any of their GPUs holds.
MODEL = "meta-llama/Llama-3.1-8B-Instruct"
CATALOG = load_catalog()
NODES = ["L4:8"] * 8 + ["A100-80GB:8"] * 4 + ["H100-80GB-SXM:8"] * 4
FACTS = Facts(
    shape=known_shape(MODEL), inventory=inventory_of(parse_island(CATALOG, text) for text in NODES), catalog=CATALOG
)
# And one of a single product: no field may work only by choosing another product.
ONE_PRODUCT = replace(FACTS, inventory=inventory_of(parse_island(CATALOG, "A100-80GB:8") for _ in range(16)))
LOADS = ("workload.requestsPerMinute", "workload.concurrency")  # on one product they decide about replicas alone


def applied(stored: Manifest, facts: Facts | None = None) -> Objects:
    """What would be applied to the cluster, by kind: first, where the plan needs it, the Job that inspects the model.

    The boot ConfigMap is the Deployment's: that names it by its content.
    """
    owner = parse(stored)
    image = (owner.spec.runtime.image if owner.spec.runtime else None) or DEFAULTS.runtime_image
    asked = subjects(owner, DEFAULTS)
    jobs = [inspect_job(owner, subject, image, PodDefaults()) for subject in asked.values()]
    known = facts or (Facts(read_shape(LONG)) if jobs else Facts())
    if "draft" in asked:
        known = replace(known, draft_is_inspected=True)
    pin = choose(owner, DEFAULTS, PodDefaults(), [], known)
    rendered = [*jobs, *objects(owner, pin.revision), *companions_of(owner)]
    found = {one["kind"]: one for one in rendered if not one.get("immutable")}
    return found | prepared(owner, known)


def applied_unchanged(stored: Manifest, facts: Facts | None = None) -> Objects:
    """`applied`, once per manifest: most fields are changed in the same one. To be read, not written to."""
    key = (json.dumps(stored, sort_keys=True), id(facts))  # facts are constants of this module
    if key not in _applied:
        _applied[key] = applied(stored, facts)
    return _applied[key]


_applied: dict[tuple[str, int], Objects] = {}


def prepared(owner: LLMDeployment, facts: Facts) -> Objects:
    """The Jobs that quantize and judge the model, and the one that tunes its draft, by what they run."""
    planned = decide(owner, DEFAULTS, facts)
    assert isinstance(planned, Plan)
    steps = steps_of(owner, planned.model_path, planned.model_revision)
    jobs = [preparation_job(owner, step, planned, None, PodDefaults()) for step in steps]
    if (key := tuning_key(owner, DraftPair(planned.model_path, planned.model_revision, None))) is not None:
        revision = render_revision(owner, planned, PodDefaults())
        jobs.append(tuning_job(owner, Step(StepKind.TUNE, key), revision, Inspected(), PodDefaults()))
    return {f"Job {job['spec']['template']['spec']['containers'][0]['args'][0]}": job for job in jobs}


def companions_of(owner: LLMDeployment) -> Iterator[Manifest]:
    """The companions of the model, in a cluster without any of the optional kinds and in one with all of them."""
    defaults = CompanionDefaults("http://prometheus:9090")
    everything = (SCALED_OBJECT, POD_MONITOR, PROMETHEUS_RULE)
    for served in ((), everything):
        if isinstance(scaler := autoscaler(owner, served, defaults), Autoscaler):
            yield scaler.manifest
    yield from monitors(owner, everything, defaults)


def on_a_gpu(**spec: Any) -> Manifest:
    return manifest(model={"source": {"huggingFace": {"repository": MODEL}}}, accelerator={"type": "GPU"}, **spec)


def changed_kinds(before: Objects, after: Objects) -> set[str]:
    return {kind for kind in before.keys() | after.keys() if before.get(kind) != after.get(kind)}


def without(stored: Manifest, paths: tuple[str, ...]) -> Manifest:
    stored = copy.deepcopy(stored)
    for path in paths:
        parent, key = place(stored["spec"], path)
        del parent[key]
    return stored


def test_every_field_has_a_change_and_every_change_a_field() -> None:
    assert set(leaves(LLMDeploymentSpec)) == set(CHANGES)


def test_the_walk_notices_a_new_field_at_any_depth() -> None:
    class Inner(BaseModel):
        deep: int | None = None

    class Added(LLMDeploymentSpec):
        fresh: list[Inner] | None = None

    assert set(leaves(Added)) - set(CHANGES) == {"fresh[].deep"}


@pytest.mark.parametrize("path", CHANGES)
def test_a_field_changed_alone_changes_what_is_applied_or_is_refused(path: str) -> None:
    change = CHANGES[path]
    if isinstance(change, NotYet):
        stored = full_manifest()
        stored["spec"] |= copy.deepcopy(change.spec)
        with pytest.raises(PlanRefused, match=re.escape(f"({change.requirement})")):
            applied(stored)
        return
    if isinstance(change, Planned):
        changes_the_plan_or_is_refused(path, change)
        return
    if isinstance(change, Decides):
        file, _, test = change.test.partition("::")
        assert f"def {test}(" in (Path(__file__).parent / file).read_text(encoding="utf-8")
        return
    if isinstance(change, Adopts):
        takes_over_what_an_older_operator_pinned(path, change)
        return
    base = without(full_manifest(), change.without if isinstance(change, Changes) else ())
    base["spec"] |= copy.deepcopy(change.instead) if isinstance(change, Changes | Refused) else {}
    mutated = copy.deepcopy(base)
    parent, key = place(mutated["spec"], path)
    if isinstance(change, Refused):
        parent[key] = change.value
        with pytest.raises(ManifestError, match=change.words):
            parse(mutated)
        return
    assert parent[key] != change.to, "the full manifest already says so"
    parent[key] = change.to
    assert changed_kinds(applied_unchanged(base), applied(mutated)) == set(change.kinds)


@pytest.mark.parametrize(
    "path", [path for path, one in CHANGES.items() if isinstance(one, Changes) and not {*EVERY_POD} & {*one.kinds}]
)
def test_a_field_that_reaches_no_pod_keeps_the_plan(path: str) -> None:
    """Another hash would plan anew by today's facts, and could end in other pods."""
    change = CHANGES[path]
    assert isinstance(change, Changes)
    base = without(full_manifest(), change.without)
    base["spec"] |= copy.deepcopy(change.instead)
    mutated = copy.deepcopy(base)
    parent, key = place(mutated["spec"], path)
    parent[key] = change.to
    assert input_hash(parse(base)) == input_hash(parse(mutated)), "name the field in planning/restart_fields.py"


def changes_the_plan_or_is_refused(path: str, change: Planned) -> None:
    base = on_a_gpu(**copy.deepcopy(change.spec))
    mutated = copy.deepcopy(base)
    parent, key = place(mutated["spec"], path)
    assert parent[key] != change.to
    parent[key] = change.to
    before = applied_unchanged(base, FACTS)
    if change.refused is None:
        assert changed_kinds(before, applied(mutated, FACTS)) == set(change.kinds), change.to
        return
    with pytest.raises(PlanRefused) as refused:
        applied(mutated, FACTS)
    assert refused.value.problem.reason == change.refused


@pytest.mark.parametrize("path", [path for path, change in CHANGES.items() if isinstance(change, Planned)])
def test_on_one_product_a_planned_field_changes_what_is_applied_or_is_refused(path: str) -> None:
    change = CHANGES[path]
    assert isinstance(change, Planned)
    base = on_a_gpu(**copy.deepcopy(change.spec))
    mutated = copy.deepcopy(base)
    parent, key = place(mutated["spec"], path)
    parent[key] = change.to
    if path in LOADS:
        before, after = (planned(one)["replicas"] for one in (base, mutated))
        assert before != after
        return
    before = applied_unchanged(base, ONE_PRODUCT)
    assert changed_kinds(before, applied_or_refused(mutated)) in (set(change.kinds), set(before))


@pytest.mark.deep
@pytest.mark.parametrize("path", [path for path, change in CHANGES.items() if isinstance(change, Changes)])
def test_on_one_product_a_field_changes_what_is_applied_or_is_refused(path: str) -> None:
    change = CHANGES[path]
    assert isinstance(change, Changes)
    base = without(full_manifest(), change.without)
    base["spec"] |= copy.deepcopy(change.instead)
    mutated = copy.deepcopy(base)
    parent, key = place(mutated["spec"], path)
    parent[key] = change.to
    before = applied_unchanged(base, ONE_PRODUCT)
    after = applied_or_refused(mutated)
    if not after:
        assert path in ("accelerator.products[]", "accelerator.type")  # no other product, and too large for a CPU
        return
    assert changed_kinds(before, after) == set(change.kinds)


def applied_or_refused(stored: Manifest) -> Objects:
    """What would be applied on one product; nothing where the plan is refused."""
    try:
        return applied(stored, ONE_PRODUCT)
    except PlanRefused:
        return {}


def planned(stored: Manifest) -> Manifest:
    """status.plan on one product."""
    found: Manifest = choose(parse(stored), DEFAULTS, PodDefaults(), [], ONE_PRODUCT).revision.plan
    return found


def takes_over_what_an_older_operator_pinned(path: str, change: Adopts) -> None:
    owner = parse(manifest())
    older = choose(owner, PlanDefaults("registry.example.com/default:0"), PodDefaults(), []).revision
    record = controller_revision(owner, older, 1)
    changed = manifest(runtime={})
    parent, key = place(changed["spec"], path)
    parent[key] = change.to
    pinning = Pinning(NoFacts(), DEFAULTS, PodDefaults())
    assert chosen_pin(pinning, owner, [record]).revision == older
    assert chosen_pin(pinning, parse(changed), [record]).revision.image == DEFAULTS.runtime_image


@pytest.mark.parametrize("path", [path for path, change in CHANGES.items() if isinstance(change, Planned)])
def test_what_needs_gpus_and_shape_is_refused_by_name_where_they_are_not_known(path: str) -> None:
    change = CHANGES[path]
    assert isinstance(change, Planned)
    stored = on_a_gpu(**copy.deepcopy(change.spec))
    for facts, missing in ((None, "inventory"), (replace(FACTS, shape=None), "modelShape")):
        with pytest.raises(PlanRefused, match=re.escape(f"({missing})")):
            applied(stored, facts)


@pytest.mark.deep
@pytest.mark.parametrize("path", [path for path, change in CHANGES.items() if isinstance(change, Changes)])
def test_a_field_left_out_changes_what_is_applied_or_is_refused(path: str) -> None:
    """The full manifest says nowhere what the default says, so silence must be heard as well."""
    stored = full_manifest()
    stored["spec"] |= copy.deepcopy(CHANGES[path].instead)  # type: ignore[union-attr]
    mutated = without(stored, (path,))
    try:
        after = applied(mutated)
    except ManifestError:
        return  # it is required, by its type or by a rule
    assert bool(changed_kinds(applied_unchanged(stored), after)) == (path not in SAYS_THE_DEFAULT)
