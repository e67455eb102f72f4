"""Image pull Secrets of the administrator's defaults and of the spec: each once, and no logins for a model's image."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.planning.facts import Facts
from millstream_operator.planning.plan import PlanDefaults
from millstream_operator.planning.spec_plan import plan_from_spec
from millstream_operator.rendering.inspect_job import Subject, inspect_job
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.pod_template import pod_template
from tests.support.llmdeployments import deployment

OWN = {"podTemplate": {"spec": {"imagePullSecrets": [{"name": "team"}, {"name": "shared"}]}}}


def pods(defaults: PodDefaults, **fields: Any) -> list[dict[str, Any]]:
    """Specs of the pod that serves and of the one that inspects."""
    owner = deployment(**fields)
    job = inspect_job(owner, Subject(owner.spec.model.source), "runtime:1", defaults)
    plan = plan_from_spec(owner, PlanDefaults("runtime:1"), Facts(checkpoint_bytes=1 << 30))
    return [pod_template(owner, plan, defaults)["spec"], job["spec"]["template"]["spec"]]


@pytest.mark.parametrize(
    ("defaults", "fields", "names"),
    [
        ([], {}, None),
        ([], OWN, ["team", "shared"]),
        (["registry"], {}, ["registry"]),
        (["registry", "shared"], OWN, ["registry", "shared", "team"]),
    ],
)
def test_those_of_the_chart_come_first(defaults: list[str], fields: dict[str, Any], names: list[str] | None) -> None:
    for spec in pods(PodDefaults(image_pull_secrets=defaults), **fields):
        assert spec.get("imagePullSecrets") == (None if names is None else [{"name": name} for name in names])


def test_a_default_is_mounted_nowhere() -> None:
    """It need not exist in a namespace: the kubelet goes on without it, and a volume of it would not."""
    source = {"model": {"source": {"image": {"reference": "registry.example.com/model:1"}}}}
    for spec in pods(PodDefaults(image_pull_secrets=["registry"]), **source):
        assert "registry" not in {volume.get("secret", {}).get("secretName") for volume in spec["volumes"]}
        assert "'secretName': 'registry'" not in repr(spec["volumes"])
