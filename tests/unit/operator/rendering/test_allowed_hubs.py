"""Hubs that the chart admits reach the containers that download, and no other; without them nothing changes."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from millstream_operator.planning.facts import Facts
from millstream_operator.planning.plan import PlanDefaults
from millstream_operator.planning.spec_plan import plan_from_spec
from millstream_operator.rendering.inspect_job import Subject, inspect_job
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.pod_template import pod_template
from millstream_runtime.sources.allowed_hubs import read_allowed_hubs
from tests.support.inspected_models import hub
from tests.support.llmdeployments import deployment

HUBS = ["mirror.models.svc", "127.0.0.0/8"]


def containers(defaults: PodDefaults) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Containers that download, of the pod that serves and of the Job that inspects; and the runtime's."""
    owner = deployment(model=hub())
    job = inspect_job(owner, Subject(owner.spec.model.source), "runtime:1", defaults)["spec"]["template"]["spec"]
    plan = plan_from_spec(owner, PlanDefaults("runtime:1"), Facts(checkpoint_bytes=1 << 30))
    pod = pod_template(owner, plan, defaults)["spec"]
    return [*pod["initContainers"], *job["containers"]], pod["containers"][0]


def test_downloads_get_them_and_read_them() -> None:
    downloads, runtime = containers(PodDefaults(allowed_hubs=HUBS))
    assert [container["name"] for container in downloads] == ["fetch-model", "inspect-model"]
    for container in downloads:
        env = {variable["name"]: variable["value"] for variable in container["env"]}
        allowed = read_allowed_hubs(env)
        assert [*allowed.names, *map(str, allowed.ranges)] == HUBS
    assert "MILLSTREAM_ALLOWED_HUBS" not in str(runtime)


def test_without_them_no_pod_changes() -> None:
    assert "MILLSTREAM_ALLOWED_HUBS" not in str(containers(PodDefaults()))


@pytest.mark.parametrize("entry", ["http://hub", "hub:8080", "10.0.0.0/40"])
def test_an_entry_that_would_stop_all_downloads_stops_the_operator(entry: str) -> None:
    with pytest.raises(ValidationError, match="is no host name"):
        PodDefaults(allowed_hubs=[entry])
