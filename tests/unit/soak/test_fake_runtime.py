"""The fake runtime answers for the configuration that the operator itself rendered, as a real pod would."""

from __future__ import annotations

from millstream_operator.planning.plan import PlanDefaults
from millstream_operator.rendering.objects import objects
from millstream_operator.rendering.pod_defaults import PodDefaults
from tests.soak.fake_runtime import answer, boot_map_name
from tests.support.llmdeployments import deployment
from tests.support.pinned_plans import choose


def test_ready_carries_the_rendered_configurations_hash() -> None:
    owner = deployment()
    pin = choose(owner, PlanDefaults(runtime_image="registry.example.com/runtime:1"), PodDefaults(), [])
    rendered = objects(owner, pin.revision)
    workload = next(one for one in rendered if one["kind"] == "Deployment")
    boot = next(one for one in rendered if one["metadata"]["name"] == boot_map_name(workload))
    assert answer("/ready", workload, boot)[0] == 503, "no replica is available yet"
    available = workload | {"status": {"availableReplicas": 1}}
    assert answer("/ready", available, None)[0] == 503, "a pod cannot start without its configuration"
    status, body = answer("/ready", available, boot)
    assert (status, body["config_hash"], body["model"]) == (200, pin.revision.config_hash, "demo")


def test_without_a_deployment_nobody_answers() -> None:
    assert boot_map_name(None) is None
    assert answer("/v1/completions", None, None)[0] == 503
