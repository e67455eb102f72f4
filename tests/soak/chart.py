"""Objects of the chart on a control plane without nodes: its roles and its policies, as helm renders them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager

from tests.soak.api import APPLY, Api, Object, Refused, eventually
from tests.soak.world import OPERATOR_NAMESPACE
from tests.support.helm_chart import have_helm, render

RELEASE = "millstream"
POLICY_KINDS = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
RIGHT_KINDS = ("ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")
OWN_POLICIES = ".policy.millstream.dev"  # how the name of each of the chart's policies ends
_PATHS = {
    "ValidatingAdmissionPolicy": "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings",
    "Secret": "/api/v1/namespaces/{}/secrets",
}
ENFORCED_SECONDS = 90.0
JSON = "application/json"


def chart_objects(kinds: Collection[str], values: Sequence[str] = ()) -> list[Object]:
    """Return the objects of these kinds in the chart's order. `values`: as helm's `--set` takes them."""
    have_helm()
    rendered = render("admissionPolicy.enabled=true", *values, release=RELEASE, namespace=OPERATOR_NAMESPACE)
    return [one for one in rendered if one["kind"] in kinds and "helm.sh/hook" not in _annotations(one)]


async def install(admin: Api, objects: Sequence[Object]) -> None:
    """Create them as an administrator."""
    for one in objects:
        await admin.create(_path(one), one)


async def remove(admin: Api, objects: Sequence[Object]) -> None:
    """Delete them again."""
    for one in reversed(objects):
        await admin.delete(f"{_path(one)}/{one['metadata']['name']}")


@asynccontextmanager
async def judged(admin: Api, operator: Api, values: Sequence[str] = ()) -> AsyncIterator[list[Object]]:
    """Put the chart's policies in force, and take them away in the end."""
    objects = chart_objects(POLICY_KINDS, values)

    async def until(judges: bool) -> None:
        await eventually(
            lambda: refusal(operator, "POST", "/api/v1/namespaces/default/configmaps", config_map("probe")),
            lambda said: (OWN_POLICIES in said) == judges,
            what=f"the policies are{'' if judges else ' not'} in force",
            seconds=ENFORCED_SECONDS,
        )

    try:
        await install(admin, objects)
        await until(judges=True)
        yield objects
    finally:
        await remove(admin, objects)
        await until(judges=False)


async def refusal(api: Api, method: str, path: str, body: Object | None = None, content_type: str = JSON) -> str:
    """Return what the API server says against a request; empty where it would carry it out. Nothing is stored."""
    query = {"dryRun": "All"}
    if content_type == APPLY:
        query |= {"fieldManager": "test", "force": "true"}
    try:
        await api.request(method, path, body, content_type=content_type, query=query)
    except Refused as error:
        return error.message or f"HTTP {error.status}"
    return ""


def config_map(name: str) -> Object:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}}


def _path(manifest: Object) -> str:
    return _PATHS[manifest["kind"]].format(manifest["metadata"].get("namespace", ""))


def _annotations(manifest: Object) -> Object:
    annotations: Object = manifest["metadata"].get("annotations") or {}
    return annotations
