"""A served model is asked again now and then: what stops answering with the same pods loses Ready, without a write
while nothing changes.
"""

from __future__ import annotations

import pytest

from millstream_operator.kube.index import OwnerKey
from millstream_operator.reconciling.probe import LONGEST_REPROBE_SECONDS, SHORTEST_REPROBE_SECONDS
from tests.support.fake_operator import FakeOperator, respec, served, world

KEY = OwnerKey("team", "demo")


async def served_for(seconds: float) -> FakeOperator:
    operator = await served()
    operator.seconds += seconds
    operator.model.questions.clear()
    return operator


async def test_a_model_is_not_asked_again_before_the_time() -> None:
    operator = await served_for(SHORTEST_REPROBE_SECONDS - 1)
    await operator.turn()
    assert operator.model.questions == []


async def test_a_model_that_answers_is_asked_again_and_nothing_is_written() -> None:
    operator = await served_for(0.0)
    for _ in range(20):
        operator.seconds += LONGEST_REPROBE_SECONDS + 1
        operator.now = "2025-03-01T00:00:00Z"
        await operator.turn()
    assert [path for path, _ in operator.model.questions] == ["/ready", "/v1/completions"] * 20
    assert operator.client.requests == []
    assert operator.retries == []


@pytest.mark.parametrize("how", ["unreachable", "another configuration", "no token"])
async def test_a_model_that_stops_answering_with_the_same_pods_loses_ready(how: str) -> None:
    operator = await served_for(LONGEST_REPROBE_SECONDS + 1)
    if how == "unreachable":
        operator.model.unreachable = "/v1/completions gave no answer within 30 seconds"
    elif how == "no token":
        operator.model.completion = {"choices": []}
    else:
        operator.model.ready = {"config_hash": "0" * 16}
    await operator.turn()
    assert operator.retries, "it is asked again soon"
    assert operator.condition("Ready")["status"] == "True", "one lost probe is no proof"
    for _ in range(6):
        await operator.turn()
    assert operator.condition("Ready")["status"] == "False"
    assert operator.condition("Ready")["reason"] in ("ServiceUnreachable", "WrongAnswer")
    operator.model.unreachable, operator.model.ready = "", {}
    operator.model.completion = {"choices": [{"text": "!"}], "usage": {"completion_tokens": 1}}
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True"


async def test_a_model_with_a_full_queue_answers() -> None:
    """HTTP 429 is what the runtime says when it has as many requests as it takes: it serves."""
    operator = await served_for(LONGEST_REPROBE_SECONDS + 1)
    operator.model.is_busy = True
    for _ in range(8):
        await operator.turn()
    assert operator.condition("Ready")["status"] == "True"
    assert operator.retries == []
    assert operator.client.requests == []
    assert len(operator.model.questions) == 2, "and is not asked at once again"


async def test_a_model_that_never_answered_is_not_ready_because_it_is_busy() -> None:
    operator = FakeOperator(world())
    operator.model.is_busy = True
    for _ in range(8):
        await operator.turn()
        operator.cluster.roll_out()
    assert operator.condition("Ready")["status"] == "False"


async def test_each_turn_puts_the_next_question_off_to_a_random_time() -> None:
    put_off: list[tuple[OwnerKey, float]] = []
    operator = await served(later=lambda key, seconds: put_off.append((key, seconds)))
    put_off.clear()
    await operator.turn()
    operator.seconds += 100.0
    await operator.turn()
    (first_key, first), (_, second) = put_off
    assert first_key == KEY
    assert SHORTEST_REPROBE_SECONDS <= first <= LONGEST_REPROBE_SECONDS
    assert second == pytest.approx(first - 100.0), "the queue keeps the earliest time alone, so each turn says it again"


async def test_what_is_scaled_to_zero_is_not_asked() -> None:
    operator = await served_for(LONGEST_REPROBE_SECONDS + 1)
    respec(operator.cluster, replicas=0)
    await operator.settle()
    assert operator.model.questions == []
