"""What a pod answered is read from its own metrics, and believed only of a pod of ours that runs what was rendered."""

from __future__ import annotations

import pytest

from millstream_operator.kube.kinds import CONTROLLER_REVISION, DEPLOYMENT, POD
from millstream_operator.probing.pod_traffic import MAX_READ, TrafficReader, read_traffic
from millstream_operator.rendering.revision import Revision
from millstream_operator.rollout.revisions import last_answered
from millstream_operator.workloads.traffic import Traffic
from tests.support.fake_operator import FakeOperator, served
from tests.support.llmdeployments import manifest

TEXT = """# HELP vllm:request_success_total Finished generations
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="stop",model_name="a}b\\"c"} 7.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="demo"} 2.0
vllm:request_success_total{engine="0",finished_reason="abort",model_name="demo"} 9.0
vllm:request_success_total{engine="0",finished_reason="error",model_name="demo"} 1.0
vllm:inter_token_latency_seconds_bucket{engine="0",le="0.1",model_name="demo"} 80.0
vllm:inter_token_latency_seconds_count{engine="0",model_name="demo"} 90.0
vllm:inter_token_latency_seconds_sum{engine="0",model_name="demo"} 4.5
process_cpu_seconds_total 12.5
"""


def test_the_counters_are_read() -> None:
    assert read_traffic(TEXT) == Traffic(7, 2, 1, 90, 4.5)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<html>",
        'vllm:request_success_total{finished_reason="stop"} NaN',
        'vllm:request_success_total{finished_reason="stop"} -1',
        'vllm:request_success_total{finished_reason="stop"} 1e300',
        'vllm:request_success_total{finished_reason="stop"} +Inf',
        'vllm:request_success_total{finished_reason="unknown"} 1',
        "vllm:request_success_total 5",
    ],
)
def test_what_is_no_counter_of_ours_is_skipped(text: str) -> None:
    assert read_traffic(text) is None


async def several(replicas: int) -> tuple[FakeOperator, Revision]:
    operator = await served(manifest(replicas=replicas))
    for pod in operator.cluster.all(POD):
        operator.pods.expositions[pod["metadata"]["name"]] = TEXT
    await operator.turn()
    kept = last_answered(operator.cluster.all(CONTROLLER_REVISION))
    assert kept is not None
    return operator, kept.revision


async def test_a_pod_of_others_and_one_of_another_configuration_are_not_believed() -> None:
    operator, revision = await several(3)
    foreign, stale, _ = pods = operator.cluster.all(POD)
    foreign["metadata"]["ownerReferences"] = []
    operator.pods.reports[stale["metadata"]["name"]] = {"phase": "Ready", "config_hash": "another"}
    reader = TrafficReader(operator.pods, operator.client)
    found = await reader.read(operator.cluster.the(DEPLOYMENT), pods, revision)
    assert found == {pods[2]["metadata"]["uid"]: Traffic(7, 2, 1, 90, 4.5)}


async def test_at_most_eight_pods_are_asked_and_one_that_does_not_answer_is_left_out() -> None:
    operator, revision = await several(12)
    pods = operator.cluster.all(POD)
    first = min(pod["metadata"]["name"] for pod in pods)
    del operator.pods.expositions[first]
    operator.pods.asked.clear()
    found = await TrafficReader(operator.pods, operator.client).read(operator.cluster.the(DEPLOYMENT), pods, revision)
    assert (len(operator.pods.asked), len(found)) == (MAX_READ, MAX_READ - 1)
