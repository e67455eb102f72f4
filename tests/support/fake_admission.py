"""What a fake API server fills in and refuses: the few defaults and validations that matter to a reconciler. Pure."""

from __future__ import annotations

import copy
from typing import Any, NoReturn

from millstream_operator.kube.client import ApiError
from millstream_operator.kube.kinds import LLM_DEPLOYMENT

Manifest = dict[str, Any]


def refuse(status: int, reason: str, message: str) -> NoReturn:
    raise ApiError(status, reason, message)


def defaulted(manifest: Manifest) -> Manifest:
    """A few of the fields that a real server fills in: a comparison of whole objects always sees a difference."""
    manifest = copy.deepcopy(manifest)
    spec = manifest.get("spec", {})
    if manifest["kind"] == "Service":
        spec.setdefault("clusterIP", "10.0.0.1")
        spec.setdefault("sessionAffinity", "None")
    if manifest["kind"] == "Deployment":
        pod = spec["template"]["spec"]
        pod.setdefault("restartPolicy", "Always")
        for container in pod["containers"]:
            container.setdefault("terminationMessagePath", "/dev/termination-log")
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                container.get(probe, {}).setdefault("successThreshold", 1)
    if manifest["kind"] == LLM_DEPLOYMENT.kind:
        spec.setdefault("replicas", 1)
        manifest.setdefault("status", {"observedGeneration": -1})
    return manifest


def validate(manifest: Manifest, live: Manifest | None) -> None:
    """The few refusals that matter to a reconciler."""
    kind = manifest["kind"]
    if kind == "ControllerRevision" and live is not None and live["data"] != manifest["data"]:
        refuse(422, "Invalid", "ControllerRevision is invalid: data: Invalid value: field is immutable")
    if kind == "Job" and live is not None and live["spec"]["template"] != manifest["spec"]["template"]:
        refuse(422, "Invalid", "Job is invalid: spec.template: Invalid value: field is immutable")
    if kind == "Deployment" and live is not None and live["spec"]["selector"] != manifest["spec"]["selector"]:
        refuse(422, "Invalid", "Deployment is invalid: spec.selector: Invalid value: field is immutable")
    if kind == "ConfigMap" and live is not None and live.get("immutable") and live.get("data") != manifest.get("data"):
        refuse(422, "Invalid", "ConfigMap is invalid: data: Forbidden: field is immutable when `immutable` is set")
    if kind == "Service":
        names = [port.get("name") for port in manifest["spec"]["ports"]]
        if len(set(names)) < len(names):
            refuse(422, "Invalid", f'Service is invalid: spec.ports[1].name: Duplicate value: "{names[0]}"')
