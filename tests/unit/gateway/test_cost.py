"""The seconds of a request at a replica, by hand."""

from __future__ import annotations

import pytest

from millstream_gateway.candidate import candidates_of
from millstream_gateway.cost import Cost
from millstream_gateway.picker_beliefs import PickerBeliefs
from millstream_gateway.replica_report import Replica
from millstream_gateway.routed_request import RoutedRequest
from tests.support.gateway_requests import chat, idle_replicas, text_of, with_report

TOKENS_PER_SECOND = 1000.0
BYTES_PER_TOKEN = 4.0  # before any answer


def cost_of(request: RoutedRequest, replica: Replica, beliefs: PickerBeliefs | None = None, now: float = 0.0) -> Cost:
    return candidates_of(request, [replica], beliefs or PickerBeliefs(), now)[0].cost


def test_an_idle_replica_computes_the_prompt_and_nothing_else() -> None:
    request = chat(text_of(4000))
    assert cost_of(request, idle_replicas(1)[0]).seconds == request.text_bytes / BYTES_PER_TOKEN / TOKENS_PER_SECOND


def test_the_reported_queue_shrinks_at_the_prefill_rate_until_now() -> None:
    replica = with_report(idle_replicas(1)[0], queued_tokens=300)
    for now, left in ((0.0, 300), (0.1, 200), (0.5, 0)):
        assert cost_of(chat("hi"), replica, now=now).backlog_tokens == pytest.approx(left)


def test_what_was_sent_since_the_report_queues_without_what_is_cached() -> None:
    beliefs, replica = PickerBeliefs(), idle_replicas(1)[0]
    sent = chat(text_of(4000, "sent"), request_id="1")
    beliefs.decide(sent, replica.endpoint, 0.5)
    tokens = sent.text_bytes / BYTES_PER_TOKEN
    assert cost_of(chat("hi"), replica, beliefs, now=0.5).backlog_tokens == pytest.approx(tokens)
    assert cost_of(chat("hi"), replica, beliefs, now=0.6).backlog_tokens == pytest.approx(tokens - 100)
    beliefs.decide(chat(text_of(4000, "sent"), request_id="2"), replica.endpoint, 0.6)
    assert cost_of(chat("hi"), replica, beliefs, now=0.6).backlog_tokens < tokens - 100 + 64 + 1


def test_running_decodes_are_part_of_each_step() -> None:
    idle = idle_replicas(1)[0]
    running = with_report(idle, running_requests=4, running_tokens=2000)
    assert cost_of(chat(text_of(4000)), idle).decode_seconds == 0
    assert cost_of(chat(text_of(4000)), running).decode_seconds == pytest.approx(0.010)  # one step
    assert cost_of(chat(text_of(20_000)), running).decode_seconds == pytest.approx(0.030)  # 5000 tokens: three


def test_a_request_waits_for_kv_blocks_until_answers_end() -> None:
    full = with_report(idle_replicas(1)[0], running_requests=8, running_tokens=60_000, free_blocks=0)
    request = chat(text_of(4000))
    beliefs = PickerBeliefs()
    # Eight answers of 128 tokens at 10 ms free 60,000 tokens in 1.28 s.
    expected = request.text_bytes / BYTES_PER_TOKEN / (60_000 / 1.28)
    assert cost_of(request, full, beliefs).kv_wait_seconds == pytest.approx(expected)
    roomy = with_report(full, free_blocks=1000)
    assert cost_of(request, roomy, beliefs).kv_wait_seconds == 0


def test_a_replica_without_a_rate_has_that_of_the_others() -> None:
    known = [
        with_report(one, prefill_tokens_per_second=rate)
        for one, rate in zip(idle_replicas(3), (500.0, 2000.0, 8000.0), strict=True)
    ]
    replicas = [*known, Replica("10.0.0.9:8000")]
    costs = [one.cost.seconds for one in candidates_of(chat(text_of(4000)), replicas, PickerBeliefs(), 0.0)]
    assert costs[3] == costs[1]
