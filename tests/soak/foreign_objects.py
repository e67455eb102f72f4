"""Requests that whoever has the operator's token might make, and that its policies must refuse: drawn at random.

Each one is valid but for that, because the API server judges the fields of an object before it asks a policy.

    another kind      Secrets, pods, roles, webhooks of nobody's business
    no owner of ours  none, another kind's, another group's, one that does not control
    a closed place    kube-*, the operator's own namespace
    open pods         a template that misses one rule of `restricted`, another ServiceAccount, a token
    somebody else's   an update, a take-over, a deletion of an object that is there
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.soak.api import APPLY, MERGE, Object
from tests.soak.world import OPERATOR_NAMESPACE

INSTANCE = "demo"
CLOSED_NAMESPACES = ("kube-system", "kube-public", OPERATOR_NAMESPACE)
UID = "8c9b6c1e-0000-4000-8000-000000000000"  # that nobody compares: a forged reference is not detected


@dataclass(frozen=True, slots=True)
class Attempt:
    """One request. `what`: in words."""

    what: str
    method: str
    path: str
    body: Object | None
    content_type: str = "application/json"


def owner_reference(**changes: Any) -> Object:
    """The reference of a child of ours, with changes."""
    return {
        "apiVersion": "millstream.dev/v1alpha1",
        "kind": "LLMDeployment",
        "name": INSTANCE,
        "uid": UID,
        "controller": True,
        "blockOwnerDeletion": True,
    } | changes


def pod_template() -> Object:
    """A template that meets every rule."""
    return {
        "metadata": {"labels": {"app": INSTANCE}},
        "spec": {
            "serviceAccountName": INSTANCE,
            "automountServiceAccountToken": False,
            "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
            "initContainers": [container("fetch")],
            "containers": [container("runtime")],
            "volumes": [{"name": "tmp", "emptyDir": {}}],
        },
    }


def container(name: str) -> Object:
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    return {"name": name, "image": "registry.example.com/a:1", "securityContext": security}


def deployment(template: Object, name: str = INSTANCE) -> Object:
    selector = {"matchLabels": {"app": INSTANCE}}
    return manifest("apps/v1", "Deployment", name) | {"spec": {"selector": selector, "template": template}}


def job(template: Object, name: str = INSTANCE) -> Object:
    template = copy.deepcopy(template)
    template["spec"]["restartPolicy"] = "Never"
    return manifest("batch/v1", "Job", name) | {"spec": {"template": template}}


def manifest(api_version: str, kind: str, name: str = INSTANCE) -> Object:
    return {"apiVersion": api_version, "kind": kind, "metadata": {"name": name}}


def owned(one: Object, *references: Object) -> Object:
    """The object with these owners; without any, with that of a child of ours."""
    return {**one, "metadata": {**one["metadata"], "ownerReferences": [*(references or [owner_reference()])]}}


# Of the kinds that the operator makes: path below a namespace, and a valid object.
CHILDREN: dict[str, Callable[[], tuple[str, Object]]] = {
    "Deployment": lambda: ("apis/apps/v1|deployments", deployment(pod_template())),
    "Job": lambda: ("apis/batch/v1|jobs", job(pod_template())),
    "Service": lambda: ("api/v1|services", manifest("v1", "Service") | {"spec": {"ports": [{"port": 80}]}}),
    "ServiceAccount": lambda: ("api/v1|serviceaccounts", manifest("v1", "ServiceAccount")),
    "ConfigMap": lambda: ("api/v1|configmaps", manifest("v1", "ConfigMap")),
    "ControllerRevision": lambda: (
        "apis/apps/v1|controllerrevisions",
        manifest("apps/v1", "ControllerRevision") | {"revision": 1, "data": {"a": "b"}},
    ),
    "NetworkPolicy": lambda: (
        "apis/networking.k8s.io/v1|networkpolicies",
        manifest("networking.k8s.io/v1", "NetworkPolicy") | {"spec": {"podSelector": {}}},
    ),
    "PodDisruptionBudget": lambda: (
        "apis/policy/v1|poddisruptionbudgets",
        manifest("policy/v1", "PodDisruptionBudget") | {"spec": {"maxUnavailable": 1, "selector": {}}},
    ),
    "PersistentVolumeClaim": lambda: (
        "api/v1|persistentvolumeclaims",
        manifest("v1", "PersistentVolumeClaim")
        | {"spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}},
    ),
    "HorizontalPodAutoscaler": lambda: (
        "apis/autoscaling/v2|horizontalpodautoscalers",
        manifest("autoscaling/v2", "HorizontalPodAutoscaler")
        | {"spec": {"maxReplicas": 2, "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "a"}}},
    ),
}
_RULES = [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}]
_ROLE_REF = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"}
_SUBJECTS = [{"kind": "ServiceAccount", "name": "a", "namespace": "default"}]
_SELECTED = {"selector": {"matchLabels": {"app": INSTANCE}}}
# Valid objects of kinds that it does not make; a path without `|` has no namespace.
OTHERS: tuple[tuple[str, Object], ...] = (
    ("api/v1|secrets", manifest("v1", "Secret")),
    ("api/v1|pods", manifest("v1", "Pod") | {"spec": {"containers": [{"name": "a", "image": "a"}]}}),
    (
        "apis/apps/v1|replicasets",
        manifest("apps/v1", "ReplicaSet") | {"spec": {**_SELECTED, "template": pod_template()}},
    ),
    ("apis/apps/v1|daemonsets", manifest("apps/v1", "DaemonSet") | {"spec": {**_SELECTED, "template": pod_template()}}),
    (
        "apis/apps/v1|statefulsets",
        manifest("apps/v1", "StatefulSet") | {"spec": {**_SELECTED, "serviceName": "a", "template": pod_template()}},
    ),
    (
        "apis/batch/v1|cronjobs",
        manifest("batch/v1", "CronJob")
        | {"spec": {"schedule": "* * * * *", "jobTemplate": {"spec": job(pod_template())["spec"]}}},
    ),
    ("apis/rbac.authorization.k8s.io/v1|roles", manifest("rbac.authorization.k8s.io/v1", "Role") | {"rules": _RULES}),
    (
        "apis/rbac.authorization.k8s.io/v1|rolebindings",
        manifest("rbac.authorization.k8s.io/v1", "RoleBinding") | {"roleRef": _ROLE_REF, "subjects": _SUBJECTS},
    ),
    (
        "apis/rbac.authorization.k8s.io/v1/clusterroles",
        manifest("rbac.authorization.k8s.io/v1", "ClusterRole") | {"rules": _RULES},
    ),
    (
        "apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
        manifest("rbac.authorization.k8s.io/v1", "ClusterRoleBinding") | {"roleRef": _ROLE_REF, "subjects": _SUBJECTS},
    ),
    ("api/v1/namespaces", manifest("v1", "Namespace", "taken-over")),
    ("apis/coordination.k8s.io/v1|leases", manifest("coordination.k8s.io/v1", "Lease", "somebody-elses")),
    (
        "api/v1|limitranges",
        manifest("v1", "LimitRange") | {"spec": {"limits": [{"type": "Container", "max": {"cpu": "1"}}]}},
    ),
    ("api/v1|resourcequotas", manifest("v1", "ResourceQuota") | {"spec": {"hard": {"pods": "0"}}}),
    (
        "apis/networking.k8s.io/v1|ingresses",
        manifest("networking.k8s.io/v1", "Ingress")
        | {"spec": {"defaultBackend": {"service": {"name": "a", "port": {"number": 80}}}}},
    ),
    (
        "apis/scheduling.k8s.io/v1/priorityclasses",
        manifest("scheduling.k8s.io/v1", "PriorityClass", "highest") | {"value": 1000},
    ),
    (
        "apis/millstream.dev/v1alpha1|llmdeployments",
        manifest("millstream.dev/v1alpha1", "LLMDeployment")
        | {"spec": {"model": {"servedName": "a", "source": {"local": {"path": "a"}}}, "accelerator": {"type": "CPU"}}},
    ),
    (
        "apis/discovery.k8s.io/v1|endpointslices",
        manifest("discovery.k8s.io/v1", "EndpointSlice") | {"addressType": "IPv4", "endpoints": []},
    ),
)


def _on_containers(key: str, value: object, *, which: str = "containers") -> Callable[[Object], None]:
    def change(spec: Object) -> None:
        for each in spec[which]:
            each["securityContext"][key] = value

    return change


def _on_pod(key: str, value: object) -> Callable[[Object], None]:
    return lambda spec: spec["securityContext"].update({key: value})


def _without(key: str) -> Callable[[Object], None]:
    return lambda spec: spec["securityContext"].pop(key)


def _container_with(key: str, value: object) -> Callable[[Object], None]:
    return lambda spec: spec["containers"][0].update({key: value})


def _volume(**source: object) -> Callable[[Object], None]:
    return lambda spec: spec["volumes"].append({"name": "more", **source})


def _both(*changes: Callable[[Object], None]) -> Callable[[Object], None]:
    def change(spec: Object) -> None:
        for one in changes:
            one(spec)

    return change


_GET = {"httpGet": {"port": 80, "host": "127.0.0.1"}}
_PROXIED = {"fieldRef": {"fieldPath": "metadata.name"}, "path": "name"}
# What the Pod Security profile `restricted` refuses, one thing each.
NOT_RESTRICTED: dict[str, Callable[[Object], None]] = {
    "hostNetwork": lambda spec: spec.update(hostNetwork=True),
    "hostPID": lambda spec: spec.update(hostPID=True),
    "hostIPC": lambda spec: spec.update(hostIPC=True),
    "hostPort": _container_with("ports", [{"containerPort": 80, "hostPort": 80}]),
    "a probe of the node": _container_with("livenessProbe", _GET),
    "a hook that asks the node": _container_with("lifecycle", {"preStop": _GET}),
    "hostPath": _volume(hostPath={"path": "/"}),
    "NFS": _volume(nfs={"server": "a", "path": "/"}),
    "privileged": _both(_on_containers("privileged", True), _on_containers("allowPrivilegeEscalation", True)),
    "escalation": _on_containers("allowPrivilegeEscalation", True),
    "escalation of an init container": _on_containers("allowPrivilegeEscalation", True, which="initContainers"),
    "a container without a security context": lambda spec: spec["containers"][0].pop("securityContext"),
    "an added capability": _on_containers("capabilities", {"drop": ["ALL"], "add": ["NET_ADMIN"]}),
    "no dropped capability": _on_containers("capabilities", {"drop": ["NET_RAW"]}),
    "root": _on_pod("runAsUser", 0),
    "a root container": _on_containers("runAsUser", 0),
    "runAsNonRoot false": _on_pod("runAsNonRoot", False),
    "a container with runAsNonRoot false": _on_containers("runAsNonRoot", False),
    "no runAsNonRoot": _without("runAsNonRoot"),
    "no seccomp profile": _without("seccompProfile"),
    "no seccomp": _on_pod("seccompProfile", {"type": "Unconfined"}),
    "a container without seccomp": _on_containers("seccompProfile", {"type": "Unconfined"}),
    "no AppArmor": _on_pod("appArmorProfile", {"type": "Unconfined"}),
    "SELinux as the node": _on_pod("seLinuxOptions", {"type": "spc_t"}),
    "an SELinux user": _on_containers("seLinuxOptions", {"user": "system_u"}),
    "a sysctl of the node": _on_pod("sysctls", [{"name": "kernel.msgmax", "value": "1"}]),
}
# What it admits besides what the operator renders.
RESTRICTED: dict[str, Callable[[Object], None]] = {
    "as it is": lambda spec: None,
    "a low port": _on_containers("capabilities", {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}),
    "a local seccomp profile": _on_pod("seccompProfile", {"type": "Localhost", "localhostProfile": "a.json"}),
    "profiles of containers": _both(
        _without("seccompProfile"),
        _on_containers("seccompProfile", {"type": "RuntimeDefault"}),
        _on_containers("seccompProfile", {"type": "RuntimeDefault"}, which="initContainers"),
    ),
    "users of containers": _both(
        _without("runAsNonRoot"),
        _on_containers("runAsNonRoot", True),
        _on_containers("runAsNonRoot", True, which="initContainers"),
    ),
    "SELinux for containers": _on_pod("seLinuxOptions", {"type": "container_t", "level": "s0:c1"}),
    "a safe sysctl": _on_pod("sysctls", [{"name": "net.ipv4.ip_unprivileged_port_start", "value": "0"}]),
    "a CSI volume": _volume(csi={"driver": "secrets.example.com"}),
    "a downward volume": _volume(downwardAPI={"items": [_PROXIED]}),
    "a Secret": _volume(secret={"secretName": "token"}),
    "a ConfigMap of several": _volume(projected={"sources": [{"configMap": {"name": "a"}}]}),
    "a probe of the pod": _container_with("livenessProbe", {"httpGet": {"port": 80}}),
}
# Restricted, and yet more than a pod of ours has.
ANOTHER_ACCOUNT: dict[str, Callable[[Object], None]] = {
    "another ServiceAccount": lambda spec: spec.update(serviceAccountName="default"),
    "the namespace's ServiceAccount": lambda spec: spec.pop("serviceAccountName"),
    "a token": lambda spec: spec.update(automountServiceAccountToken=True),
    "a token by default": lambda spec: spec.pop("automountServiceAccountToken"),
    "a token as a volume": _volume(projected={"sources": [{"serviceAccountToken": {"path": "token"}}]}),
}
OPEN_PODS = {**NOT_RESTRICTED, **ANOTHER_ACCOUNT}
NOT_OURS: dict[str, list[Object]] = {
    "no owner": [],
    "another kind's": [owner_reference(kind="Deployment", apiVersion="apps/v1")],
    "another group's": [owner_reference(apiVersion="example.com/v1")],
    "a group's that ends as ours": [owner_reference(apiVersion="notmillstream.dev/v1")],
    "a group's that begins as ours": [owner_reference(apiVersion="millstream.dev.example.com/v1")],
    "one that does not control": [owner_reference(controller=False)],
}


def changed(change: Callable[[Object], Any]) -> Object:
    """The pod template after a change of its spec."""
    template = copy.deepcopy(pod_template())
    change(template["spec"])
    return template


def attempts(seed: int, count: int, namespaces: Sequence[str], foreign: Sequence[tuple[str, Object]]) -> list[Attempt]:
    """Draw requests. `foreign`: (path, object) of somebody else's objects that are there, as they were applied."""
    draw = random.Random(seed)  # the same attempts for the same seed
    sorts = (_of_another_kind, _without_owner, _in_a_closed_place, _with_open_pods)
    drawn = [draw.choice(sorts)(draw, draw.choice(namespaces)) for _ in range(count * 3 // 4)]
    return [*drawn, *(_on_foreign(draw, *draw.choice(foreign)) for _ in range(count - len(drawn)))]


def path_of(path: str, namespace: str, name: str = "") -> str:
    """`api/v1|pods` -> `/api/v1/namespaces/NAMESPACE/pods`."""
    return f"/{path.replace('|', f'/namespaces/{namespace}/')}" + (f"/{name}" if name else "")


def creation(draw: random.Random, what: str, path: str, namespace: str, body: Object) -> Attempt:
    """By POST or by server-side apply."""
    if draw.random() < 0.5:
        return Attempt(f"create {what}", "POST", path_of(path, namespace), body)
    return Attempt(f"apply {what}", "PATCH", path_of(path, namespace, body["metadata"]["name"]), body, APPLY)


def _of_another_kind(draw: random.Random, namespace: str) -> Attempt:
    path, body = draw.choice(OTHERS)
    body = owned(body) if draw.random() < 0.5 and "|" in path else body
    return creation(draw, f"a {body['kind']}", path, namespace, body)


def _without_owner(draw: random.Random, namespace: str) -> Attempt:
    path, body = CHILDREN[draw.choice([*CHILDREN])]()
    whose = draw.choice([*NOT_OURS])
    body = {**body, "metadata": {**body["metadata"], "ownerReferences": NOT_OURS[whose]}}
    return creation(draw, f"a {body['kind']}, owner: {whose}", path, namespace, body)


def _in_a_closed_place(draw: random.Random, _namespace: str) -> Attempt:
    path, body = CHILDREN[draw.choice([*CHILDREN])]()
    namespace = draw.choice(CLOSED_NAMESPACES)
    return creation(draw, f"a {body['kind']} in {namespace}", path, namespace, owned(body))


def _with_open_pods(draw: random.Random, namespace: str) -> Attempt:
    how = draw.choice([*OPEN_PODS])
    template = changed(OPEN_PODS[how])
    path, body = draw.choice(
        [("apis/apps/v1|deployments", deployment(template)), ("apis/batch/v1|jobs", job(template))]
    )
    return creation(draw, f"a {body['kind']} with {how}", path, namespace, owned(body))


def _on_foreign(draw: random.Random, path: str, live: Object) -> Attempt:
    """An update, a take-over or a deletion."""
    what, namespace, name = live["kind"], live["metadata"]["namespace"], live["metadata"]["name"]
    where = path_of(path, namespace, name)
    changes: list[Attempt] = [
        Attempt(f"delete a foreign {what}", "DELETE", where, None),
        Attempt(f"label a foreign {what}", "PATCH", where, {"metadata": {"labels": {"a": "b"}}}, MERGE),
        Attempt(
            f"take over a foreign {what}", "PATCH", where, {"metadata": {"ownerReferences": [owner_reference()]}}, MERGE
        ),
        Attempt(f"apply over a foreign {what}", "PATCH", where, owned(live), APPLY),
    ]
    return draw.choice(changes)
