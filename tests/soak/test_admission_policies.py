"""The chart's policies on a real API server that forbids nothing else: what whoever has the operator's token can do.

Rights are left out on purpose (`AlwaysAllow`), so that each refusal here is one of the policies.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from tests.soak import audit
from tests.soak.api import APPLY, MERGE, Api, Object, condition, eventually, is_ready, llmd, llmd_path
from tests.soak.chart import OWN_POLICIES, RELEASE, judged, refusal
from tests.soak.experiments import CREATE, NAME, spec_a, spec_b
from tests.soak.foreign_objects import (
    ANOTHER_ACCOUNT,
    CHILDREN,
    CLOSED_NAMESPACES,
    INSTANCE,
    NOT_RESTRICTED,
    OTHERS,
    RESTRICTED,
    attempts,
    changed,
    deployment,
    job,
    owned,
    owner_reference,
    path_of,
)
from tests.soak.operator_process import OperatorProcess
from tests.soak.results import missed
from tests.soak.transitions import transitions
from tests.soak.world import OPERATOR_NAMESPACE, World

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900), pytest.mark.deep]
ATTEMPTS = 200
IN_CHART = {"MILLSTREAM_OPERATOR_NAMESPACE": OPERATOR_NAMESPACE}
DEPLOYMENTS, PODS = "apis/apps/v1|deployments", "api/v1|pods"


@dataclass
class Judged:
    """`operator`: as the operator's user, whom the policies judge. `namespace`: one that is open to models."""

    world: World
    operator: Api
    namespace: str

    @property
    def admin(self) -> Api:
        return self.world.admin

    async def said(self, path: str, body: Object) -> str:
        """What is said against its creation by the operator's user."""
        return await refusal(self.operator, "POST", path_of(path, self.namespace), body)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def here(where: World) -> AsyncIterator[Judged]:
    """The policies with the chart's defaults."""
    operator = Api(where.plane.url, "operator", where.plane.ssl_context())
    namespace = await where.namespace("open")
    account = {"metadata": {"name": INSTANCE}}
    await where.admin.create(f"/api/v1/namespaces/{namespace}/serviceaccounts", account)
    try:
        async with judged(where.admin, operator):
            yield Judged(where, operator, namespace)
    finally:
        await operator.close()


async def foreign_objects(here: Judged) -> list[tuple[str, Object]]:
    """Make objects of others: (path, object) of each kind that the operator makes, and of some more."""
    namespace = await here.world.namespace("foreign")
    made = [CHILDREN[kind]() for kind in CHILDREN] + [one for one in OTHERS if one[0] in ("api/v1|secrets", PODS)]
    applied = []
    for path, body in made:
        manifest = copy.deepcopy(body)
        manifest["metadata"]["namespace"] = namespace
        if manifest["kind"] == "Pod":
            manifest["spec"]["serviceAccountName"] = INSTANCE
        await here.admin.apply(path_of(path, namespace, INSTANCE), manifest, "somebody")
        applied.append((path, manifest))
    return applied


async def with_owner(here: Judged, namespace: str, body: Object) -> Object:
    """Return the object as a child of an LLMDeployment that is there: the garbage collector leaves it alone."""
    live = await here.admin.get(llmd_path(namespace, INSTANCE))
    if live is None:
        live = await here.admin.create(llmd_path(namespace), llmd(INSTANCE, spec_a()))
    return owned(body, owner_reference(uid=live["metadata"]["uid"]))


async def test_200_random_objects_outside_the_rules_are_refused(here: Judged, seed: int) -> None:
    foreign = await foreign_objects(here)
    passed, otherwise = [], []
    for one in attempts(seed, ATTEMPTS, [here.namespace, "default"], foreign):
        said = await refusal(here.operator, one.method, one.path, one.body, content_type=one.content_type)
        if not said:
            passed.append(one.what)
        elif OWN_POLICIES not in said:
            otherwise.append(f"{one.what}: {said}")
    assert passed == []
    assert otherwise == [], "refused, and not by a policy: these attempts show nothing"


async def test_nobody_else_is_judged(here: Judged) -> None:
    for path, body in OTHERS:
        assert await refusal(here.admin, "POST", path_of(path, here.namespace), body) == "", body["kind"]
    for kind in CHILDREN:
        path, body = CHILDREN[kind]()
        if (kind, body["metadata"]["name"]) != ("ServiceAccount", INSTANCE):
            assert await refusal(here.admin, "POST", path_of(path, here.namespace), body) == "", kind


@pytest.mark.parametrize("kind", CHILDREN)
async def test_a_child_of_each_kind_may_be_made_changed_and_deleted(here: Judged, kind: str) -> None:
    path, body = CHILDREN[kind]()
    namespace = await here.world.namespace("child")
    child = await with_owner(here, namespace, body)
    await here.operator.apply(path_of(path, namespace, INSTANCE), child, "test")
    await here.operator.merge(path_of(path, namespace, INSTANCE), {"metadata": {"labels": {"a": "b"}}})
    await here.operator.request("DELETE", path_of(path, namespace, INSTANCE))


def with_account(template: Object) -> Object:
    """As a pod that an administrator may make: its ServiceAccount is that of the namespace here."""
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "oracle", **template["metadata"]}} | {
        "spec": {**template["spec"], "serviceAccountName": INSTANCE}
    }


@pytest.mark.parametrize("name", [*NOT_RESTRICTED, *RESTRICTED])
async def test_a_template_passes_where_kubernetes_own_check_of_restricted_passes(here: Judged, name: str) -> None:
    """The oracle is the API server's Pod Security admission, asked about a pod of the same template."""
    change: Callable[[Object], Any] = {**NOT_RESTRICTED, **RESTRICTED}[name]
    template = changed(change)
    restricted = await here.admin.get("/api/v1/namespaces/restricted")
    if restricted is None:
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        await here.admin.create("/api/v1/namespaces", {"metadata": {"name": "restricted", "labels": labels}})
        account = {"metadata": {"name": INSTANCE}}
        await here.admin.create("/api/v1/namespaces/restricted/serviceaccounts", account)
    oracle = await refusal(here.admin, "POST", path_of(PODS, "restricted"), with_account(template))
    assert oracle == "" or "violates PodSecurity" in oracle, oracle
    assert bool(oracle) == (name in NOT_RESTRICTED), oracle
    for path, body in ((DEPLOYMENTS, deployment(template)), ("apis/batch/v1|jobs", job(template))):
        said = await here.said(path, owned(body))
        assert bool(said) == bool(oracle), said
        assert not said or f"millstream-pods{OWN_POLICIES}" in said, said


async def test_an_apparmor_annotation_that_leaves_it_is_refused_too(here: Judged) -> None:
    template = changed(RESTRICTED["as it is"])
    template["metadata"]["annotations"] = {"container.apparmor.security.beta.kubernetes.io/runtime": "unconfined"}
    assert "AppArmor" in await here.said(DEPLOYMENTS, owned(deployment(template)))


@pytest.mark.parametrize("name", ANOTHER_ACCOUNT)
async def test_pods_run_as_their_own_account_without_a_token(here: Judged, name: str) -> None:
    said = await here.said(DEPLOYMENTS, owned(deployment(changed(ANOTHER_ACCOUNT[name]))))
    assert "the ServiceAccount of their LLMDeployment, without a token" in said


async def test_what_broke_a_rule_before_may_be_changed_and_no_other_rule_broken(here: Judged) -> None:
    """As an object of an earlier version, or one that somebody edited by hand: the operator must be able to repair."""
    namespace = await here.world.namespace("broken")
    where = path_of(DEPLOYMENTS, namespace, INSTANCE)
    broken = await with_owner(here, namespace, deployment(changed(NOT_RESTRICTED["hostNetwork"])))
    broken["spec"]["replicas"] = 0
    await here.admin.create(path_of(DEPLOYMENTS, namespace), broken)
    await here.operator.merge(where, {"metadata": {"labels": {"a": "b"}}})
    pods = {"template": {"spec": {"automountServiceAccountToken": True}}}
    assert "without a token" in await refusal(here.operator, "PATCH", where, {"spec": pods}, content_type=MERGE)
    mended = {"template": {"spec": {"hostNetwork": None}}}
    await here.operator.merge(where, {"spec": mended})
    again = {"template": {"spec": {"hostNetwork": True}}}
    assert "of their node" in await refusal(here.operator, "PATCH", where, {"spec": again}, content_type=MERGE)


async def test_a_child_may_not_be_given_away(here: Judged) -> None:
    namespace = await here.world.namespace("given")
    path, body = CHILDREN["ConfigMap"]()
    where = path_of(path, namespace, INSTANCE)
    await here.operator.create(path_of(path, namespace), await with_owner(here, namespace, body))
    for references in ([], [owner_reference(kind="ReplicaSet", apiVersion="apps/v1")]):
        change = {"metadata": {"ownerReferences": references}}
        said = await refusal(here.operator, "PATCH", where, change, content_type=MERGE)
        assert "whose controller is an LLMDeployment" in said


async def test_an_orphan_is_adopted_and_what_only_looks_like_one_is_not(here: Judged) -> None:
    namespace = await here.world.namespace("orphans")
    path, body = CHILDREN["ConfigMap"]()
    labels, annotations = {"millstream.dev/deployment": INSTANCE}, {"millstream.dev/applied": "digest"}
    adopt = {"metadata": {"ownerReferences": [owner_reference()]}}
    looks: dict[str, tuple[Object, bool]] = {
        "orphan": ({"labels": labels, "annotations": annotations}, True),
        "labelled": ({"labels": labels}, False),
        "marked": ({"annotations": annotations}, False),
        "owned": (
            {
                "labels": labels,
                "annotations": annotations,
                "ownerReferences": [owner_reference(kind="ReplicaSet", apiVersion="apps/v1")],
            },
            False,
        ),
    }
    for name, (metadata, is_ours) in looks.items():
        await here.admin.create(path_of(path, namespace), {**body, "metadata": {"name": name, **metadata}})
        said = await refusal(here.operator, "PATCH", path_of(path, namespace, name), adopt, content_type=MERGE)
        assert (said == "") == is_ours, (name, said)


OWN: dict[str, tuple[str, str, Object]] = {
    "its Lease": (
        "apis/coordination.k8s.io/v1|leases",
        RELEASE,
        {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"},
    ),
    "its record": ("api/v1|configmaps", "millstream-calibration", {"apiVersion": "v1", "kind": "ConfigMap"}),
}


@pytest.mark.parametrize("name", OWN)
async def test_what_is_its_own_is_exempt_in_its_namespace_by_its_name(here: Judged, name: str) -> None:
    path, own_name, body = OWN[name]
    mine = {**body, "metadata": {"name": own_name}}
    other = {**body, "metadata": {"name": "another"}}
    assert await refusal(here.operator, "POST", path_of(path, OPERATOR_NAMESPACE), mine) == ""
    own = path_of(path, OPERATOR_NAMESPACE, own_name)
    if own_name != RELEASE:  # the Lease is written by POST and PUT alone
        assert await refusal(here.operator, "PATCH", own, mine, APPLY) == ""
    for where, what in ((OPERATOR_NAMESPACE, other), (here.namespace, mine)):
        assert OWN_POLICIES in await refusal(here.operator, "POST", path_of(path, where), what)
    await here.admin.create(path_of(path, OPERATOR_NAMESPACE), mine)
    assert await refusal(here.operator, "PATCH", own, {"metadata": {"labels": {"a": "b"}}}, content_type=MERGE) == ""
    assert OWN_POLICIES in await refusal(here.operator, "DELETE", own)
    await here.admin.delete(own)


async def test_its_secret_is_filled_in_and_never_made(here: Judged) -> None:
    path, secret = "api/v1|secrets", {"metadata": {"name": "millstream-probe-key"}}
    assert OWN_POLICIES in await refusal(here.operator, "POST", path_of(path, OPERATOR_NAMESPACE), secret)
    await here.admin.create(path_of(path, OPERATOR_NAMESPACE), secret)
    where = path_of(path, OPERATOR_NAMESPACE, "millstream-probe-key")
    change = {"data": {"key": "YQ=="}}
    assert await refusal(here.operator, "PATCH", where, change, content_type=MERGE) == ""
    await here.admin.delete(where)


async def test_events_and_the_status_are_exempt_and_the_spec_is_not(here: Judged) -> None:
    about = {"kind": "LLMDeployment", "namespace": here.namespace, "name": "status"}
    event = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": "e"}, "involvedObject": about}
    assert await here.said("api/v1|events", event) == ""
    await here.admin.create(llmd_path(here.namespace), llmd("status", spec_a()))
    where = llmd_path(here.namespace, "status")
    change = {"status": {"observedGeneration": 1}}
    assert await refusal(here.operator, "PATCH", f"{where}/status", change, content_type=MERGE) == ""
    assert OWN_POLICIES in await refusal(here.operator, "PATCH", where, {"spec": {"replicas": 3}}, content_type=MERGE)
    await here.admin.delete(where)


async def test_a_question_about_its_rights_is_answered(here: Judged) -> None:
    """`kubectl auth can-i --list --as …` asks so."""
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": here.namespace},
    }
    assert (await here.operator.create("/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", review))["status"]


async def test_the_operator_works_under_the_policies(here: Judged, seed: int) -> None:
    """Made, changed, repaired, orphaned and taken back, deleted; then random specs, each as without the policies."""
    before = len(refused_writes(here.world))
    async with OperatorProcess(here.world.plane, "judged", settings=IN_CHART) as operator:
        await operator.wait_ready()
        namespace = await here.world.namespace("judged")
        where = llmd_path(namespace, NAME)

        async def ready() -> None:
            await eventually(lambda: here.admin.request("GET", where), is_ready, what="Ready", seconds=120)

        await CREATE.change(here.world, namespace)
        await ready()
        for spec in (spec_b(), spec_a()):
            await here.admin.replace_spec(namespace, NAME, spec)
            await ready()
        pods = await deployment_uid(here, namespace)
        await here.admin.delete(where, policy="Orphan")
        await eventually(lambda: here.admin.get(where), lambda live: live is None, what="deleted", seconds=30)
        await eventually(
            lambda: owners(here, namespace), lambda references: references == [], what="orphaned", seconds=60
        )
        await here.admin.create(llmd_path(namespace), llmd(NAME, spec_a()))
        await ready()
        assert await deployment_uid(here, namespace) == pods, "taken back"
        await here.admin.delete(where)
        assert operator.crashes == []
    result = await transitions(here.world, count=4, seed=seed)
    assert missed("transitions", result) == []
    assert refused_writes(here.world)[before:] == []


async def deployment_uid(here: Judged, namespace: str) -> str:
    live = await here.admin.request("GET", path_of(DEPLOYMENTS, namespace, NAME))
    return str(live["metadata"]["uid"])


async def owners(here: Judged, namespace: str) -> list[Object]:
    live = await here.admin.request("GET", path_of(DEPLOYMENTS, namespace, NAME))
    references: list[Object] = live["metadata"].get("ownerReferences") or []
    return references


def refused_writes(world: World) -> list[str]:
    """Writes of operator processes that were forbidden."""
    return [
        f"{write.verb} {write.resource} {write.namespace}/{write.name}"
        for write in audit.read(world.plane.audit_log)
        if write.status == 403 and "millstream" in write.agent
    ]


@pytest.mark.parametrize("namespace", CLOSED_NAMESPACES)
async def test_a_user_reads_why_a_namespace_has_no_models(here: Judged, namespace: str) -> None:
    async with OperatorProcess(here.world.plane, "closed", settings=IN_CHART) as operator:
        await operator.wait_ready()
        where = llmd_path(namespace, NAME)
        await here.admin.create(llmd_path(namespace), llmd(NAME, spec_a()))
        live = await eventually(
            lambda: here.admin.request("GET", where),
            lambda one: condition(one, "Ready").get("reason") == "AdmissionDenied",
            what="refused",
            seconds=60,
        )
        message = condition(live, "Ready")["message"]
        assert f"the namespace {namespace} is closed to models" in message
        assert "admissionPolicy.allowedNamespaces of the chart" in message
        await here.admin.delete(where)
