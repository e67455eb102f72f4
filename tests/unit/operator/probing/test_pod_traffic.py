"""What a pod answered is read from its own metrics, and believed only of a pod of ours that runs what was rendered."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.kube.kinds import CONTROLLER_REVISION, DEPLOYMENT, POD
from millstream_operator.probing.pod_traffic import MAX_READ, TrafficReader, read_traffic
from millstream_operator.rendering.revision import Revision
from millstream_operator.rollout.revisions import last_answered
from millstream_operator.workloads.traffic import Histogram, Traffic
from millstream_runtime.boot import BootLedger
from millstream_runtime.engine.request import FinishReason, Prefill
from millstream_runtime.server.operations.metrics import RequestTimes, ServerMetrics
from tests.support.fake_operator import FakeOperator, served
from tests.support.llmdeployments import manifest
from tests.unit.operator.rendering.test_alerts import StillEngine

TEXT = """# HELP vllm:request_success_total Finished generations
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="stop",model_name="a}b\\"c"} 7.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="demo"} 2.0
vllm:request_success_total{engine="0",finished_reason="abort",model_name="demo"} 9.0
vllm:request_success_total{engine="0",finished_reason="error",model_name="demo"} 1.0
vllm:request_time_per_output_token_seconds_bucket{engine="0",le="0.05",model_name="demo"} 6.0
vllm:request_time_per_output_token_seconds_bucket{engine="0",le="0.1",model_name="demo"} 8.0
vllm:request_time_per_output_token_seconds_bucket{engine="0",le="+Inf",model_name="demo"} 9.0
vllm:request_time_per_output_token_seconds_count{engine="0",model_name="demo"} 9.0
vllm:request_time_per_output_token_seconds_sum{engine="0",model_name="demo"} 0.5
vllm:request_prompt_tokens_bucket{engine="0",le="1.0",model_name="demo"} 0.0
vllm:request_prompt_tokens_bucket{engine="0",le="+Inf",model_name="demo"} 9.0
millstream_engine_restarts_total{engine="0",model_name="demo"} 2.0
process_start_time_seconds 1.79e+09
process_cpu_seconds_total 12.5
"""


INFINITE = float("inf")
READ = Traffic(
    stop=7,
    length=2,
    error=1,
    token_times=Histogram((0.05, 0.1, INFINITE), (6, 2, 1)),
    token_times_seconds=0.5,
    prompt_tokens=Histogram((1.0, INFINITE), (0, 9)),
    engine_restarts=2,
    started_at_seconds=1.79e9,
)


def test_the_counters_are_read() -> None:
    assert read_traffic(TEXT) == READ


@pytest.mark.parametrize(
    "buckets",
    [
        'x_bucket{le="0.1"} 5',  # no last bucket
        'x_bucket{le="0.1"} 5\nx_bucket{le="+Inf"} 4',  # counts that fall
        'x_bucket{le="nan"} 5\nx_bucket{le="-1"} 5\nx_bucket{le="0.1 5',
        "\n".join(f'x_bucket{{le="{number}"}} 1' for number in range(100)) + '\nx_bucket{le="+Inf"} 1',  # too many
    ],
)
def test_buckets_that_make_no_histogram_are_left_out(buckets: str) -> None:
    named = buckets.replace("x_bucket", "vllm:request_time_per_output_token_seconds_bucket")
    found = read_traffic(f'vllm:request_success_total{{finished_reason="stop"}} 1\n{named}')
    assert found == Traffic(stop=1)


def test_the_runtimes_own_metrics_are_read() -> None:
    """The names and labels are those that the server writes, so a change there is noticed here."""
    engine: Any = StillEngine()
    metrics = ServerMetrics("demo", BootLedger(), engine)
    times = RequestTimes(arrived_at_seconds=1.0, num_prompt_tokens=40, max_tokens=16)
    metrics.first_token(times, 2.0, Prefill(1.5, 0))
    for at_seconds in (2.1, 2.2, 2.3):
        metrics.next_token(times, at_seconds)
    metrics.finished(FinishReason.LENGTH, times, 2.3)
    metrics.finished(FinishReason.ERROR, times, 2.3)
    found = read_traffic(metrics.exposition().decode())
    assert found is not None
    assert (found.stop, found.length, found.error, found.engine_restarts) == (0, 1, 1, 0)
    assert found.token_times.count == found.prompt_tokens.count == found.max_tokens.count == 1
    assert found.token_times_seconds == pytest.approx(0.1)
    assert found.started_at_seconds > 1e9


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
    assert found == {pods[2]["metadata"]["uid"]: READ}


async def test_at_most_eight_pods_are_asked_and_one_that_does_not_answer_is_left_out() -> None:
    operator, revision = await several(12)
    pods = operator.cluster.all(POD)
    first = min(pod["metadata"]["name"] for pod in pods)
    del operator.pods.expositions[first]
    operator.pods.asked.clear()
    found = await TrafficReader(operator.pods, operator.client).read(operator.cluster.the(DEPLOYMENT), pods, revision)
    assert (len(operator.pods.asked), len(found)) == (MAX_READ, MAX_READ - 1)
