"""The fake runtime answers for the configuration that the operator itself rendered, as a real pod would."""

from __future__ import annotations

from millstream_operator.planning.plan import PlanDefaults
from millstream_operator.reconciling.revisions import choose
from millstream_operator.rendering.objects import objects
from millstream_operator.rendering.pod_defaults import PodDefaults
from soak.fake_runtime import answer
from tests.support.llmdeployments import deployment


def test_ready_carries_the_rendered_configurations_hash() -> None:
    owner = deployment()
    pin = choose(owner, PlanDefaults(runtime_image="registry.example.com/runtime:1"), PodDefaults(), [])
    rendered = next(one for one in objects(owner, pin.revision) if one["kind"] == "Deployment")
    assert answer("/ready", rendered)[0] == 503, "no replica is available yet"
    status, body = answer("/ready", rendered | {"status": {"availableReplicas": 1}})
    assert (status, body["config_hash"], body["model"]) == (200, pin.revision.config_hash, "demo")


def test_without_a_deployment_nobody_answers() -> None:
    assert answer("/v1/completions", None)[0] == 503
