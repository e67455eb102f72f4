"""The rate at which an engine computes prompts: tokens per second of the steps that compute some, and of no others."""

from __future__ import annotations

import pytest

from millstream_runtime.engine.prefill_rate import HALF_LIFE_TOKENS, PrefillRate
from millstream_runtime.engine.request import Request
from tests.support.engines import MakeEngine, WriteModel, generate, greedy, requests_for


def test_only_steps_with_prompts_count_and_each_whole(write_model: WriteModel, make_engine: MakeEngine) -> None:
    """A step takes a millisecond, by the clock of `make_engine`."""
    engine = make_engine(write_model(), max_num_batched_tokens=32)
    assert engine.stats().prefill_tokens_per_second == 0.0
    generate(engine, requests_for([[number % 50 for number in range(96)]], greedy(1)))
    assert engine.stats().prefill_tokens_per_second == pytest.approx(32_000)  # three steps of a millisecond
    before = engine.stats().prefill_tokens_per_second
    generate(engine, [Request("warm-up", [7] * 20, greedy(1), is_heartbeat=True)])
    assert engine.stats().prefill_tokens_per_second == before
    engine.add_request(Request("decodes", [9, 8, 7, 6], greedy(20)))
    engine.step()
    with_its_prompt = engine.stats().prefill_tokens_per_second
    assert with_its_prompt < before  # a millisecond for four tokens
    while engine.has_work():
        engine.step()
    assert engine.stats().prefill_tokens_per_second == with_its_prompt


def test_recent_prompts_count_more() -> None:
    rate = PrefillRate()
    for _ in range(100):
        rate.observe(1024, 1.0)
    assert rate.tokens_per_second == pytest.approx(1024)
    for _ in range(4 * HALF_LIFE_TOKENS // 512):
        rate.observe(512, 1.0)
    assert rate.tokens_per_second == pytest.approx(512, rel=0.1)


def test_many_short_prompts_do_not_hide_what_a_long_one_takes() -> None:
    rate = PrefillRate()
    rate.observe(4096, 1.0)
    for _ in range(20):
        rate.observe(2, 0.01)
    assert rate.tokens_per_second > 3000
