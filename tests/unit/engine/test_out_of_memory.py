"""A step without memory costs its largest prompt its place: no other request loses a token, and no block is lost."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.execution.execution_mode import Execution
from millstream_runtime.engine.out_of_memory import is_out_of_memory
from millstream_runtime.engine.request import FinishReason, Request, RequestError, SamplingParams, TokenOutput
from millstream_runtime.engine.speculation.skip import Skip
from tests.support.crowded import crowd
from tests.support.drafters import OftenRight
from tests.support.engines import MakeEngine, WriteModel, generate
from tests.support.short_of_memory import ShortOfMemory
from tests.support.ways import CROWDED, EXECUTIONS, SAMPLINGS, SPECULATING, VOCABULARY

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.deep]
DRAFTED = {name: SPECULATING[name] for name in ("speculating", "speculating, replayed and overlapped")}
MODES: dict[str, Callable[[], Execution | None]] = {**EXECUTIONS, **CROWDED, **DRAFTED}
ERRORS: dict[str, Callable[[], Exception]] = {
    "device": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "host": MemoryError,
    "allocator": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 1099511627776 bytes. Error code 12 (Cannot allocate memory)"
    ),
}


def make_requests(sampling: SamplingParams, name: str = "") -> list[Request]:
    """Two share a long prefix, one of which is the longest."""
    rng = random.Random(6)
    shared = [rng.randrange(VOCABULARY) for _ in range(40)]
    prompts = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in (5, 33, 18)]
    prompts += [[*shared, 7, 9], [*shared, *(rng.randrange(VOCABULARY) for _ in range(50))], shared]
    return [Request(f"{name}{index}", prompt, sampling) for index, prompt in enumerate(prompts)]


def run_with_failures(engine: Engine, short: ShortOfMemory, seed: int, requests: list[Request]) -> list[TokenOutput]:
    """The requests come one by one, and every few steps one has no memory."""
    rng, waiting, outputs = random.Random(seed), list(requests), []
    while waiting or engine.has_work():
        if waiting and rng.random() < 0.6:
            engine.add_request(waiting.pop())
        if short.passes_left is None and short.num_failed < 3 and rng.random() < 0.3:
            short.passes_left = rng.randrange(3)
        outputs += engine.step()
        engine.check_integrity()
    short.passes_left = None
    return outputs


def drafts_so_far(engine: Engine) -> int:
    """Decodes that checked drafts, or would have, had there not been a step without memory before."""
    counts = engine.stats().speculation
    return 0 if counts is None else counts.num_checks + counts.skipped[Skip.OUT_OF_MEMORY]


@pytest.mark.matrix("mode")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sampling", ["greedy", "seeded, filtered and penalised"])
@pytest.mark.parametrize("mode", MODES)
def test_the_others_give_the_same_tokens(
    mode: str, sampling: str, seed: int, write_model: WriteModel, make_engine: MakeEngine
) -> None:
    expected = {
        name: tokens
        for one in make_requests(SAMPLINGS[sampling])
        for name, tokens in generate(make_engine(write_model(), enable_prefix_caching=False), [one]).items()
    }
    drafter = OftenRight.about(make_requests(SAMPLINGS[sampling]), expected, VOCABULARY) if mode in DRAFTED else None
    engine = make_engine(write_model(), execution=MODES[mode](), max_num_batched_tokens=48, drafter=drafter)
    if mode in CROWDED:
        crowd(engine)
    short = ShortOfMemory(engine, list(ERRORS.values())[seed])
    outputs = run_with_failures(engine, short, seed, make_requests(SAMPLINGS[sampling]))
    assert short.num_failed, "no step was short of memory"
    given_up = {one.request_id for one in outputs if one.finish_reason is FinishReason.ERROR}
    assert 1 <= len(given_up) <= short.num_failed
    for one in outputs:
        if one.request_id in given_up and one.finish_reason is not None:
            assert (one.token_id, one.error) == (None, RequestError.OUT_OF_MEMORY)
    for name, tokens in expected.items():
        said = [one.token_id for one in outputs if one.request_id == name and one.token_id is not None]
        assert said == (tokens[: len(said)] if name in given_up else tokens)
    assert engine.stats().kv_blocks_used == 0
    again = generate(engine, make_requests(SAMPLINGS[sampling], "again-"))
    assert again == {f"again-{name}": tokens for name, tokens in expected.items()}, (
        "the cache holds computed blocks only"
    )
    assert (drafter is None) == (drafts_so_far(engine) == 0)


@pytest.mark.parametrize("error", ERRORS)
def test_the_largest_prompt_of_the_step_loses_its_place(
    error: str, write_model: WriteModel, make_engine: MakeEngine
) -> None:
    engine = make_engine(write_model())
    short = ShortOfMemory(engine, ERRORS[error])
    engine.add_request(Request("running", [4, 5, 6], SAMPLINGS["greedy"]))
    engine.step()
    for name, length in (("short", 10), ("long", 30), ("middle", 20)):
        engine.add_request(Request(name, [7] * length, SAMPLINGS["greedy"]))
    short.passes_left = 0
    (output,) = engine.step()
    assert (output.request_id, output.finish_reason, output.error) == ("long", "error", RequestError.OUT_OF_MEMORY)
    assert {one.request_id for one in engine.step()} == {"running", "short", "middle"}


@pytest.mark.parametrize("mode", EXECUTIONS)
def test_prompt_logprobs_are_whole_after_a_step_without_memory(
    mode: str, write_model: WriteModel, make_engine: MakeEngine
) -> None:
    scored = Request("scored", [5, 6, 7, 8, 9], replace(SAMPLINGS["greedy"], prompt_logprobs=1))
    engine = make_engine(write_model(), execution=MODES[mode]())
    short = ShortOfMemory(engine, ERRORS["host"])
    engine.add_request(scored)
    engine.add_request(Request("long", [7] * 70, SAMPLINGS["greedy"]))
    short.passes_left = 2  # the layers and the prompt's logits are computed, those of the next tokens are not
    outputs = [one for _ in range(4) for one in engine.step()]
    assert short.num_failed == 1
    (prefill,) = (one.prefill for one in outputs if one.request_id == "scored" and one.prefill is not None)
    assert prefill.prompt_logprobs is not None
    described = [None if one is None else one.token_id for one in prefill.prompt_logprobs]
    assert described == [None, 6, 7, 8, 9]


def test_another_error_ends_the_engine(write_model: WriteModel, make_engine: MakeEngine) -> None:
    engine = make_engine(write_model())
    ShortOfMemory(engine, lambda: RuntimeError("a bug")).passes_left = 0
    engine.add_request(Request("any", [4, 5, 6], SAMPLINGS["greedy"]))
    with pytest.raises(RuntimeError, match="a bug"):
        engine.step()


def test_no_memory_for_the_warm_up_is_a_failed_boot(write_model: WriteModel, make_engine: MakeEngine) -> None:
    engine = make_engine(write_model())
    ShortOfMemory(engine, ERRORS["host"]).passes_left = 0
    with pytest.raises(MemoryError):
        engine.warm_up()


@pytest.mark.parametrize("error", ERRORS)
def test_errors_of_every_allocator_are_known(error: str) -> None:
    assert is_out_of_memory(ERRORS[error]())
    assert not is_out_of_memory(ValueError("DefaultCPUAllocator: can't allocate memory"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))


def test_torch_says_what_is_looked_for() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
