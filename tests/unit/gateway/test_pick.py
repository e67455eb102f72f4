"""Which replica is picked, and why."""

from __future__ import annotations

from collections import Counter

import pytest

from millstream_gateway.pick import PickReason, Policy, pick
from millstream_gateway.picker_beliefs import PickerBeliefs
from millstream_gateway.replica_report import Replica
from tests.support.gateway_requests import chat, idle_replicas, text_of, with_report


def first(request: object, replicas: list[Replica], beliefs: PickerBeliefs | None = None, now: float = 0.0) -> str:
    return pick(request, replicas, beliefs or PickerBeliefs(), now).endpoints[0]  # type: ignore[arg-type]


def test_pickers_agree_on_what_they_do_not_know_whatever_order_they_see() -> None:
    replicas = idle_replicas(5)
    for number in range(30):
        request = chat(f"question {number}")
        assert first(request, replicas) == first(request, replicas[::-1])


def test_unknown_conversations_are_spread_and_a_lost_replica_moves_only_its_own() -> None:
    replicas = idle_replicas(4)
    requests = [chat(f"question {number}") for number in range(400)]
    before = [first(request, replicas) for request in requests]
    after = [first(request, replicas[1:]) for request in requests]
    assert min(Counter(before).values()) > 60  # of 100 each
    assert all(old == new for old, new in zip(before, after, strict=True) if old != replicas[0].endpoint)


def test_the_holder_of_the_prefix_is_picked_until_its_queue_costs_more_than_computing_it() -> None:
    beliefs, request = PickerBeliefs(), chat(text_of(8000), request_id="1")  # 2 seconds at 1000 tokens per second
    replicas = idle_replicas(3, at_seconds=10.0)
    beliefs.decide(request, replicas[2].endpoint, 0.0)
    picked = pick(request, replicas, beliefs, 10.0)
    assert (picked.endpoints[0], picked.reason) == (replicas[2].endpoint, PickReason.COST)
    for queued_tokens, holder_is_picked in ((1500, True), (2500, False)):
        busy = [*replicas[:2], with_report(replicas[2], queued_tokens=queued_tokens)]
        assert (first(request, busy, beliefs, 10.0) == replicas[2].endpoint) is holder_is_picked


def test_of_those_that_cost_nearly_the_same_the_holder_is_picked() -> None:
    beliefs, request = PickerBeliefs(), chat(text_of(8000))
    replicas = [with_report(one, prefill_tokens_per_second=100_000.0) for one in idle_replicas(3)]  # 20 ms
    for holder in replicas:
        beliefs = PickerBeliefs()
        beliefs.decide(request, holder.endpoint, -1.0)
        picked = pick(request, replicas, beliefs, 0.0)
        assert (picked.endpoints[0], picked.reason) == (holder.endpoint, PickReason.PREFIX)


def test_a_prefix_that_all_hold_is_spread() -> None:
    beliefs, replicas = PickerBeliefs(), idle_replicas(3)
    for replica in replicas:
        beliefs.decide(chat("first", system=text_of(8000)), replica.endpoint, -1.0)
    picked = Counter(first(chat(f"user {n}", system=text_of(8000)), replicas, beliefs) for n in range(60))
    assert len(picked) == 3


def test_a_replica_that_is_10_percent_or_50_ms_dearer_is_nearly_equal_and_no_other() -> None:
    request = chat(text_of(4000))  # about a second
    for queued_tokens, is_near in ((99, True), (140, False)):
        preferred = first(request, idle_replicas(2))
        replicas = [
            with_report(one, queued_tokens=queued_tokens) if one.endpoint == preferred else one
            for one in idle_replicas(2)
        ]
        assert (first(request, replicas) == preferred) is is_near
    short = chat("hi")
    for queued_tokens, is_near in ((45, True), (60, False)):
        preferred = first(short, idle_replicas(2))
        replicas = [
            with_report(one, queued_tokens=queued_tokens) if one.endpoint == preferred else one
            for one in idle_replicas(2)
        ]
        assert (first(short, replicas) == preferred) is is_near


def test_the_turn_before_is_guessed_to_be_where_every_picker_sends_what_it_does_not_know() -> None:
    question, replicas = text_of(8000), idle_replicas(4)
    place = first(chat(question), replicas)
    second = chat(question, text_of(400, "answer"), "and?")
    queued = [with_report(one, queued_tokens=1000) if one.endpoint == place else one for one in replicas]
    assert first(chat(question), queued) != place
    picked = pick(second, queued, PickerBeliefs(), 0.0)
    assert picked.endpoints[0] == place
    assert picked.ranked[0].is_guess
    knowing = PickerBeliefs()  # the picker that placed the turn before itself knows better
    other = next(one.endpoint for one in replicas if one.endpoint != place)
    knowing.decide(chat(question), other, -1.0)
    assert first(second, queued, knowing) == other


def test_only_replicas_that_serve_are_picked() -> None:
    request, (draining, ready, starting) = chat("hi"), idle_replicas(3)
    replicas = [with_report(draining, phase="Draining"), ready, with_report(starting, phase="WarmingUp")]
    picked = pick(request, replicas, PickerBeliefs(), 0.0)
    assert (picked.endpoints, picked.reason) == ((ready.endpoint,), PickReason.ONLY_REPLICA)
    none = pick(request, [replicas[0]], PickerBeliefs(), 0.0)
    assert (none.endpoints, none.reason) == ((), PickReason.NO_REPLICA)


def test_all_others_that_serve_follow_as_fallbacks_by_cost() -> None:
    replicas = [
        with_report(one, queued_tokens=tokens)
        for one, tokens in zip(idle_replicas(4), (900, 0, 5000, 2000), strict=True)
    ]
    picked = pick(chat(text_of(2000)), replicas, PickerBeliefs(), 0.0)
    assert picked.endpoints == tuple(replicas[index].endpoint for index in (1, 0, 3, 2))


@pytest.mark.parametrize(
    ("policy", "changes", "expected"),
    [
        (Policy.MOST_FREE_KV, [{"free_blocks": 100}, {"free_blocks": 4000}, {"free_blocks": 900}], 1),
        (Policy.LEAST_REQUESTS, [{"running_requests": 3}, {"queued_requests": 2}, {"running_requests": 1}], 2),
    ],
)
def test_the_other_policies_look_at_what_they_are_named_for(
    policy: Policy, changes: list[dict[str, int]], expected: int
) -> None:
    replicas = [with_report(one, **change) for one, change in zip(idle_replicas(3), changes, strict=True)]
    assert pick(chat("hi"), replicas, PickerBeliefs(), 0.0, policy).endpoints[0] == replicas[expected].endpoint


def test_what_this_picker_has_just_sent_counts_for_every_policy() -> None:
    replicas = idle_replicas(3)
    for policy in (Policy.MOST_FREE_KV, Policy.LEAST_REQUESTS, Policy.ROUND_ROBIN, Policy.PREDICTED_TTFT):
        beliefs, picked = PickerBeliefs(), set()
        for number in range(3):
            request = chat(text_of(2000, f"word{number}"), request_id=str(number))
            endpoint = pick(request, replicas, beliefs, 0.0, policy).endpoints[0]
            beliefs.decide(request, endpoint, 0.0)
            picked.add(endpoint)
        assert len(picked) == 3, policy
