"""Overlapped steps: what waits for a read and why, and what becomes of those who end while a step is in flight."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.execution.execution_mode import Execution
from millstream_runtime.engine.execution.last_tokens import LastTokens
from millstream_runtime.engine.execution.overlap import Wait, reason_to_wait, reasons_to_wait
from millstream_runtime.engine.execution.step_input import StepInput
from millstream_runtime.engine.execution.step_rows import PromptSlab, SampledRow
from millstream_runtime.engine.request import FinishReason, Request, SamplingParams, TokenLogprobs, TokenOutput
from millstream_runtime.engine.sampling.token_counts import TokenCounts
from millstream_runtime.engine.scheduling.prefix_cache import extend_hashes
from millstream_runtime.engine.scheduling.sequence import UNREAD, Sequence
from tests.support.engines import MakeEngine, WriteModel, generate, greedy, requests_for

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = [5, 17, 80, 3]
OVERLAPPED = Execution(overlapped=True)


@pytest.fixture
def engine(write_model: WriteModel, make_engine: MakeEngine) -> Engine:
    return make_engine(write_model(), execution=OVERLAPPED)


def sequence_of(sampling: SamplingParams, *, is_read: bool = False, **state: Any) -> Sequence:
    """One whose first token is sampled by a step in flight."""
    sequence = Sequence(Request("x", PROMPT, sampling), 0, 0, list(PROMPT), len(PROMPT))
    sequence.expect()
    if is_read:
        sequence.accept(9)
    for name, value in state.items():
        setattr(sequence, name, value)
    return sequence


SAMPLED = SamplingParams(
    9, temperature=0.8, seed=3, top_k=5, top_p=0.9, min_p=0.1, min_tokens=4, logit_bias=((1, 2.0),)
)
RULE: dict[str, tuple[Sequence, bool, Wait | None]] = {
    "greedy": (sequence_of(greedy(9)), False, None),
    "sampled, filtered, biased, with a least length": (sequence_of(SAMPLED), False, None),
    "prompt log-probabilities": (sequence_of(greedy(9, prompt_logprobs=2)), False, None),
    "log-probabilities": (sequence_of(greedy(9, logprobs=0)), False, None),
    "presence penalty": (sequence_of(greedy(9, presence_penalty=0.1)), False, None),
    "repetition penalty": (sequence_of(greedy(9, repetition_penalty=1.1)), False, None),
    "a processor": (sequence_of(greedy(9), processors=(lambda logits, ids: None,)), False, Wait.PROCESSORS),
    "a processor that nothing follows": (
        sequence_of(greedy(9), processors=(lambda logits, ids: None,), is_complete=True),
        False,
        None,
    ),
    "new angles": (sequence_of(greedy(9)), True, Wait.RECOMPUTE),
    "cancelled": (sequence_of(greedy(9), has_ended=True), True, None),
    "read": (sequence_of(greedy(9), is_read=True), True, None),
}


@pytest.mark.parametrize("name", RULE)
def test_the_rule_says_who_waits_and_why(name: str) -> None:
    sequence, must_recompute, expected = RULE[name]
    assert reason_to_wait(sequence, must_recompute=must_recompute) == expected


def test_the_reasons_of_a_step_are_those_of_its_sequences_and_drafts() -> None:
    step = [(sequence, must_recompute) for sequence, must_recompute, _ in RULE.values()]
    assert reasons_to_wait([]) == set()
    assert reasons_to_wait(step) == {Wait.PROCESSORS, Wait.RECOMPUTE}
    assert reasons_to_wait(step, drafts=True) == {Wait.PROCESSORS, Wait.RECOMPUTE, Wait.DRAFTS}
    assert reasons_to_wait(step[:3], drafts=True) == {Wait.DRAFTS}, "none of them needs its own token"


def events_of(engine: Engine, requests: list[Request]) -> list[str]:
    """What the runner was asked, in order: `launch` and `read`."""
    events: list[str] = []
    launch = engine._runner.launch

    def watched(*step: Any) -> Any:
        events.append("launch")
        launched = launch(*step)

        def read() -> Any:
            events.append("read")
            return launched.read()

        return launched._replace(read=read)

    engine._runner.launch = watched  # type: ignore[method-assign, assignment]
    generate(engine, requests)
    return events


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.3, "presence_penalty": 0.2},
        {"logprobs": 2},
        {"logprobs": 0, "prompt_logprobs": 1, "frequency_penalty": 0.5},
    ],
    ids=str,
)
def test_the_next_step_is_launched_before_the_last_is_read(engine: Engine, asked: dict[str, Any]) -> None:
    events = events_of(engine, requests_for([PROMPT], greedy(4, **asked)))
    assert events == ["launch", "launch", "read", "launch", "read", "launch", "read", "read"]


def test_a_logits_processor_makes_every_step_wait(engine: Engine) -> None:
    engine.processors_for = lambda request: (lambda logits, ids: None,)
    assert events_of(engine, requests_for([PROMPT], greedy(4))) == ["launch", "read"] * 4


def reported(output: TokenOutput) -> tuple[Any, ...]:
    """What a client sees of an output. Log-probabilities are near one another, not equal: an overlapped step has other
    rows, and how a CPU without AVX-512 rounds a product depends on how many there are."""

    def near(found: TokenLogprobs | None) -> Any:
        if found is None:
            return None
        top = [(token, pytest.approx(value, abs=1e-4)) for token, value in found.top]
        return found.token_id, found.rank, pytest.approx(found.logprob, abs=1e-4), top

    prompt = output.prefill and [near(one) for one in output.prefill.prompt_logprobs or ()]
    cached = output.prefill and output.prefill.num_cached_tokens
    return output.token_id, output.finish_reason, output.error, near(output.logprobs), cached, prompt


@pytest.mark.parametrize("max_num_batched_tokens", [17, 2048])
def test_what_is_reported_is_that_of_synchronous_steps(
    write_model: WriteModel, make_engine: MakeEngine, max_num_batched_tokens: int
) -> None:
    """Tokens, log-probabilities of prompts (in chunks, too) and answers, penalised and not, side by side."""
    samplings = [
        greedy(12, logprobs=3, prompt_logprobs=2),
        greedy(12, repetition_penalty=1.5, frequency_penalty=0.7, logprobs=1),
        replace(SAMPLED, max_tokens=14, presence_penalty=1.1, logprobs=0),
        greedy(12),
    ]
    prompts = [[(7 * row + 3 * place) % 190 for place in range(25 + row)] for row in range(4)]

    def outputs(execution: Execution | None) -> dict[str, list[Any]]:
        engine = make_engine(write_model(), execution=execution, max_num_batched_tokens=max_num_batched_tokens)
        engine._pace = None  # chunks that follow measured times would differ, and with them how sums are rounded
        for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
            engine.add_request(Request(str(index), prompt, sampling))
        found: dict[str, list[Any]] = {}
        while engine.has_work():
            for one in engine.step():
                found.setdefault(one.request_id, []).append(reported(one))
        return found

    assert outputs(OVERLAPPED) == outputs(None)


def test_a_stop_drops_the_token_that_was_under_way(engine: Engine, write_model: WriteModel) -> None:
    tokens = generate(engine, requests_for([PROMPT], greedy(20)))["0"]
    stop = tokens[6]
    engine.add_request(Request("one", PROMPT, greedy(20, stop_token_ids=frozenset({stop}))))
    outputs: list[TokenOutput] = []
    while engine.has_work():
        outputs += engine.step()
    assert [one.token_id for one in outputs] == tokens[: tokens.index(stop) + 1]
    assert [one.finish_reason for one in outputs if one.finish_reason] == [FinishReason.STOP]
    engine.check_integrity()
    assert engine.stats().kv_blocks_used == 0


def test_whoever_is_cancelled_keeps_its_blocks_until_its_step_is_read(engine: Engine) -> None:
    engine.add_request(Request("gone", PROMPT, greedy(20)))
    engine.add_request(Request("here", PROMPT[:2], greedy(20)))
    engine.step()
    sequence = engine._sequences["gone"]
    held = set(sequence.block_table)
    assert sequence.steps_in_flight == 1
    assert sequence.token_ids[-1] == UNREAD
    engine.abort("gone")
    engine.add_request(Request("gone", [7, 8, 9], greedy(3)))  # the name is free at once
    assert engine._blocks.num_free_blocks < engine._blocks.num_blocks - 1
    assert all(engine._blocks.is_held(block) for block in held)
    engine.check_integrity()
    assert [one.request_id for one in engine.step()] == ["here"]
    assert not sequence.block_table
    engine.check_integrity()
    assert engine.stats().num_requests_running == 2


@pytest.mark.parametrize("cancelled", [False, True])
def test_numbers_that_go_wrong_reach_nobody_who_gets_the_blocks(engine: Engine, cancelled: bool) -> None:
    """Even where the request is cancelled before anyone has read what became of it."""
    expected = generate(engine, requests_for([[4, 5, 6]], greedy(12)))["0"]
    engine.add_request(Request("sick", PROMPT, greedy(12)))
    engine.add_request(Request("well", [4, 5, 6], greedy(12)))
    outputs = engine.step()
    block = engine._sequences["sick"].block_table[0]
    layers = engine._runner._forward._cache.layers
    for layer in layers:
        layer[block] = float("nan")
    outputs += engine.step()
    if cancelled:
        engine.abort("sick")
    while engine.has_work():
        outputs += engine.step()
        engine.check_integrity()
    sick = [(one.token_id, one.finish_reason) for one in outputs if one.request_id == "sick"][1:]
    assert sick == ([] if cancelled else [(None, FinishReason.ERROR)])
    assert [one.token_id for one in outputs if one.request_id == "well"] == expected
    assert all(layer.isfinite().all() for layer in layers), "a block was given back with numbers that went wrong"
    assert generate(engine, requests_for([[4, 5, 6], PROMPT], greedy(12)))["0"] == expected


@pytest.mark.parametrize("seed", range(3))
def test_the_prefix_cache_knows_accepted_tokens_only(
    seed: int, write_model: WriteModel, make_engine: MakeEngine
) -> None:
    """Through random stops, cancels and preemptions: every block that it can find holds a prefix of what was said."""
    engine = make_engine(write_model(), execution=OVERLAPPED, max_num_batched_tokens=32)
    rng = random.Random(seed)
    said: dict[str, list[int]] = {}
    sampling = SamplingParams(60, temperature=1.0, stop_token_ids=frozenset(range(4)), ignore_eos=True)
    for step in range(150):
        if rng.random() < 0.3:
            prompt = [rng.randrange(199) for _ in range(rng.randint(1, 40))]
            said[f"r{step}"] = list(prompt)
            engine.add_request(Request(f"r{step}", prompt, replace(sampling, seed=step)))
        if said and rng.random() < 0.1:
            engine.abort(rng.choice(list(said)))
        for output in engine.step():
            assert output.token_id is not None
            said[output.request_id].append(output.token_id)
        engine.check_integrity()
    cache = engine._blocks._cache
    assert cache is not None
    known = {
        block_hash
        for tokens in said.values()
        for block_hash in extend_hashes(Sequence(Request("x", tokens, sampling), 0, 0, tokens, 1), 16, cache.root)
    }
    assert set(cache._block_of) <= known
    assert any(len(tokens) > 64 for tokens in said.values())


def test_a_token_that_went_wrong_is_looked_up_as_some_token() -> None:
    """-1 marks numbers that went wrong; the next step is under way by then, and an index of -1 would end the engine."""
    last = LastTokens(4, torch.device("cpu"))
    last.keep([2, 0], torch.tensor([-1, 7]))
    token_ids = torch.tensor([UNREAD, 5, UNREAD])
    last.fill(token_ids, StepInput([UNREAD, 5, UNREAD], [], [], unread_places=[0, 2], unread_rows=[0, 2]))
    assert token_ids.tolist() == [7, 5, 0]


META = torch.device("meta")
LATE = SamplingParams(
    9, temperature=0.7, top_k=7, top_p=0.9, min_p=0.1, presence_penalty=0.5, repetition_penalty=1.2, logprobs=2
)
ROWS: dict[str, list[SamplingParams]] = {
    "greedy": [greedy(9), greedy(9)],
    "drawn": [SamplingParams(9, seed=1), SamplingParams(9, seed=2)],
    "drawn beside greedy": [SamplingParams(9), greedy(9)],
    "filters": [SamplingParams(9, top_k=5), SamplingParams(9, top_p=0.9), SamplingParams(9, min_p=0.1), LATE],
    "biased and suppressed": [SAMPLED, greedy(9, logit_bias=((3, 1.0), (5, -1.0)), min_tokens=3)],
    "penalised": [greedy(9, frequency_penalty=0.3), LATE, greedy(9)],
    "log-probabilities": [greedy(9, logprobs=3), SamplingParams(9, logprobs=0), SamplingParams(9)],
}


@pytest.mark.parametrize("name", ROWS)
def test_nothing_is_read_from_the_device_before_the_tokens_are(name: str, engine: Engine) -> None:
    """On torch's meta device there is nothing to read: what would wait for a GPU fails."""
    runner = engine._runner
    runner.device = META
    runner._token_counts, runner._last_tokens = TokenCounts(8, META), LastTokens(8, META)
    rows = []
    for row, sampling in enumerate(ROWS[name]):
        tokens = [*PROMPT, 9, 7]
        rows.append(SampledRow(Sequence(Request("x", PROMPT, sampling), row, 0, tokens, len(PROMPT), row=row)))
    logits = torch.empty(len(rows), 199, dtype=torch.bfloat16, device=META)
    read = runner._sample(logits, rows, list(range(len(rows))))
    runner._describe_prompt(PromptSlab(rows[0].sequence, 0, range(3)), logits.new_empty(3, 199))
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        read()
