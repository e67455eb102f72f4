"""What the author of an LLMDeployment must not reach: other ServiceAccounts, the node, other programs in the pod."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from millstream_operator.api.load import ManifestError, parse
from millstream_operator.kube.kinds import DEPLOYMENT, SERVICE_ACCOUNT
from tests.support.fake_operator import FakeOperator, world
from tests.support.llmdeployments import manifest

ROOT = Path(__file__).resolve().parents[2]
Manifest = dict[str, Any]


def runtime(**fields: Any) -> Manifest:
    return {"containers": [{"name": "runtime", **fields}]}


# spec.podTemplate.spec
ATTEMPTS: dict[str, Manifest] = {
    "another ServiceAccount": {"serviceAccountName": "admin"},
    "another ServiceAccount by its old name": {"serviceAccount": "admin"},
    "a token": {"automountServiceAccountToken": True},
    "a token in a volume": {"volumes": [{"name": "t", "projected": {"sources": [{"serviceAccountToken": {}}]}}]},
    "a path of the node": {"volumes": [{"name": "host", "hostPath": {"path": "/"}}]},
    "a path of the node in the container": runtime(volumeMounts=[{"name": "host", "mountPath": "/host"}]),
    "a device of the node": runtime(volumeDevices=[{"name": "host", "devicePath": "/dev/sda"}]),
    "the node's network": {"hostNetwork": True},
    "the node's processes": {"hostPID": True},
    "the node's memory": {"hostIPC": True},
    "the node's users": {"hostUsers": True},
    "a port of the node": runtime(ports=[{"containerPort": 1, "hostPort": 22}]),
    "a node of their choice": {"nodeName": "control-plane"},
    "root": {"securityContext": {"runAsUser": 0, "runAsNonRoot": False}},
    "root in the container": runtime(securityContext={"runAsUser": 0}),
    "a privileged container": runtime(securityContext={"privileged": True}),
    "capabilities": runtime(securityContext={"capabilities": {"add": ["SYS_ADMIN"]}}),
    "a kernel without a filter": {"securityContext": {"seccompProfile": {"type": "Unconfined"}}},
    "another program": runtime(command=["/bin/sh", "-c", "id"]),
    "other arguments": runtime(args=["--api-keys-file="]),
    "another image": runtime(image="evil"),
    "a hook": runtime(lifecycle={"postStart": {"exec": {"command": ["id"]}}}),
    "a probe that runs something": runtime(livenessProbe={"exec": {"command": ["id"]}}),
    "every key of a Secret": runtime(envFrom=[{"secretRef": {"name": "s"}}]),
    "a terminal": runtime(stdin=True, tty=True),
    "another container": {"containers": [{"name": "evil", "image": "evil"}]},
    "another init container": {"initContainers": [{"name": "evil", "image": "evil"}]},
    "another program before it": {"initContainers": [{"name": "fetch-model", "command": ["id"]}]},
    "an ephemeral container": {"ephemeralContainers": [{"name": "evil", "image": "evil"}]},
    "others' processes in the pod": {"shareProcessNamespace": True},
    "other names for hosts": {"hostAliases": [{"ip": "127.0.0.1", "hostnames": ["huggingface.co"]}]},
    "another resolver": {"dnsPolicy": "None", "dnsConfig": {"nameservers": ["127.0.0.1"]}},
    "the pod's own fields in a variable": runtime(
        env=[{"name": "TZ", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]
    ),
}


async def pod_of(stored: Manifest) -> Manifest | None:
    """The pod template that the operator applies for an object; None where it applies none."""
    operator = FakeOperator(world(stored))
    await operator.settle()
    if not operator.cluster.all(DEPLOYMENT):
        return None
    assert [one["metadata"]["name"] for one in operator.cluster.all(SERVICE_ACCOUNT)] == ["demo"]
    found: Manifest = operator.cluster.the(DEPLOYMENT)["spec"]["template"]
    return found


PODS: dict[str, Manifest | None] = {}  # made once


@cache
def attempt(name: str) -> Manifest:
    return manifest(podTemplate={"spec": ATTEMPTS[name]})


@pytest.mark.parametrize("name", ATTEMPTS)
def test_what_a_pod_must_not_have_is_refused_in_a_file(name: str) -> None:
    with pytest.raises(ManifestError, match=r"spec\.podTemplate\.spec"):
        parse(attempt(name))


@pytest.mark.parametrize("name", ATTEMPTS)
async def test_what_a_pod_must_not_have_reaches_no_pod_of_a_stored_object(name: str) -> None:
    """The API server prunes what its schema has not; here nothing prunes but the operator."""
    if "plain" not in PODS:
        PODS["plain"] = await pod_of(manifest())
    assert PODS["plain"] is not None
    # None: it is not Ready, with the reason InvalidSpec.
    assert await pod_of(attempt(name)) in (None, PODS["plain"])


def test_the_api_server_keeps_no_field_that_the_schema_has_not() -> None:
    text = (ROOT / "crds" / "millstream.dev_llmdeployments.yaml").read_text(encoding="utf-8")
    assert "openAPIV3Schema:" in text
    assert "x-kubernetes-preserve-unknown-fields" not in text
    assert "x-kubernetes-embedded-resource" not in text


@pytest.mark.parametrize("path", ["../../etc", "a/../../etc", "..", "a//../..", "a\0b"])
@pytest.mark.parametrize("source", ["local", "claim"])
def test_a_path_that_leaves_its_folder_is_refused(source: str, path: str) -> None:
    at = {"local": {"path": path}} if source == "local" else {"persistentVolumeClaim": {"claimName": "m", "path": path}}
    with pytest.raises(ManifestError, match=r"spec\.model\.source"):
        parse(manifest(model={"source": at}))
