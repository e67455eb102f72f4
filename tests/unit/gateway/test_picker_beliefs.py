"""Beliefs follow what replicas report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millstream_gateway.picker_beliefs import PickerBeliefs
from millstream_gateway.prefix_chunks import CHUNK_BYTES
from millstream_gateway.replica_report import Answer, id_hash
from tests.support.gateway_requests import IDLE, chat, idle_replicas, text_of

HERE = "10.0.0.1:8000"


def answer(request_id: str, prompt_tokens: int, cached_tokens: int, completion_tokens: int = 10) -> Answer:
    return Answer(id_hash(request_id), prompt_tokens, cached_tokens, completion_tokens)


def test_a_request_counts_from_its_decision_until_a_report_can_know_of_it() -> None:
    beliefs, request = PickerBeliefs(), chat(text_of(4000))
    beliefs.decide(request, HERE, now_seconds=5.0)
    assert beliefs.held_chunks(HERE, request) == len(request.chunks)
    before, after = idle_replicas(1, at_seconds=4.9)[0], idle_replicas(1, at_seconds=5.1)[0]
    assert [one.request for one in beliefs.sent_since(before)] == [request]
    assert [*beliefs.sent_since(after)] == []


def test_a_new_boot_id_clears_all_and_the_same_one_nothing() -> None:
    beliefs, request = PickerBeliefs(), chat(text_of(4000))
    beliefs.observe_report(HERE, IDLE, [])
    beliefs.decide(request, HERE, 1.0)
    beliefs.observe_report(HERE, IDLE, [])
    assert beliefs.held_chunks(HERE, request) == len(request.chunks)
    beliefs.observe_report(HERE, replace(IDLE, boot_id="boot-2"), [])
    assert beliefs.held_chunks(HERE, request) == 0
    assert [*beliefs.sent_since(idle_replicas(1)[0])] == []


def test_it_believes_in_no_more_than_the_reported_capacity() -> None:
    beliefs, request = PickerBeliefs(), chat(text_of(40_000))
    beliefs.observe_report(HERE, replace(IDLE, free_blocks=64, total_blocks=64), [])  # 1024 tokens
    beliefs.decide(request, HERE, 1.0)
    assert beliefs.held_chunks(HERE, request) * CHUNK_BYTES == 4096  # at 4 bytes per token


def test_reported_cached_tokens_take_back_what_was_evicted_and_all_that_is_older() -> None:
    beliefs = PickerBeliefs()
    oldest, middle, newest = (chat(text_of(8000, word), request_id=word) for word in ("one", "two", "three"))
    for request in (oldest, middle, newest):
        beliefs.decide(request, HERE, 1.0)
    again = chat(text_of(8000, "two"), request_id="again")
    beliefs.decide(again, HERE, 2.0)
    beliefs.observe_report(HERE, IDLE, [answer("again", 2000, cached_tokens=0)])
    assert beliefs.held_chunks(HERE, oldest) < len(oldest.chunks)
    assert beliefs.held_chunks(HERE, newest) == len(newest.chunks)
    assert beliefs.held_chunks(HERE, again) == len(again.chunks)  # it was computed just now


def test_a_belief_that_is_confirmed_stays() -> None:
    beliefs = PickerBeliefs()
    first, second = chat(text_of(8000, "one"), request_id="1"), chat(text_of(8000, "two"), request_id="2")
    for request in (first, second):
        beliefs.decide(request, HERE, 1.0)
    beliefs.decide(replace(second, request_id="3"), HERE, 2.0)
    beliefs.observe_report(HERE, IDLE, [answer("3", 2000, cached_tokens=1984)])
    assert beliefs.held_chunks(HERE, first) == len(first.chunks)


def test_tokens_of_a_text_are_learned_from_answers() -> None:
    beliefs = PickerBeliefs()
    for number in range(50):
        request = chat(text_of(3000, f"word{number}"), request_id=str(number))
        beliefs.decide(request, HERE, 1.0)
        beliefs.observe_report(HERE, IDLE, [answer(str(number), request.text_bytes // 2, 0)])
    assert beliefs.ratio.bytes_per_token == pytest.approx(2, rel=0.01)
    assert beliefs.prompt_tokens(request) == pytest.approx(request.text_bytes / 2, rel=0.01)


def test_a_replica_that_is_gone_takes_no_memory() -> None:
    beliefs, request = PickerBeliefs(), chat(text_of(4000))
    beliefs.decide(request, HERE, 1.0)
    beliefs.keep_only(["10.0.0.2:8000"])
    assert beliefs.held_chunks(HERE, request) == 0


def test_guesses_that_find_nothing_are_trusted_less() -> None:
    beliefs = PickerBeliefs()
    trusted = []
    for number in range(5):
        turn = chat("question", text_of(2000, f"a{number}"), "and", request_id=str(number), system=text_of(4000))
        trusted.append(beliefs.guessed_tokens(turn))
        beliefs.decide(turn, HERE, 1.0, is_guess=True)
        beliefs.observe_report(HERE, IDLE, [answer(str(number), turn.text_bytes // 4, 0)])
    assert trusted[4] < trusted[0] / 3
