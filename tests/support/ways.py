"""Ways to run the same requests, executions to run them by, and how to see that what was meant to happen did.

Each way computes the requests under another circumstance (company, chunks, cache hits, preemptions, ...). Each
execution carries the steps out otherwise: as a GPU would, decodes replayed from recordings (a tape stands in for CUDA
graphs), steps overlapped, prompts cut into small chunks, drafts checked. Which steps an engine of `engine_in` takes
depends on no measured time, so what happens once always happens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from millstream_runtime.config import Device, GovernorMode, RuntimeConfig
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.execution.execution_mode import Execution
from millstream_runtime.engine.request import Request, SamplingParams
from millstream_runtime.engine.speculation.drafter import Drafter
from tests.support.crowded import Crowded, crowd
from tests.support.drafters import RandomLengths
from tests.support.engines import MakeEngine, WriteModel, generate
from tests.support.small_pool import shrink_pool
from tests.support.tape_recorder import TapeRecorder

NEW_TOKENS = 20
VOCABULARY = 199


def make_requests(sampling: SamplingParams) -> list[Request]:
    """Eight requests; five begin with the same 40 tokens, two of them are equal, and one is a single token."""
    rng = random.Random(3)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(count)]

    shared = tokens(40)
    prompts = [tokens(1), tokens(16), tokens(75), shared, *([*shared, *tokens(n)] for n in (1, 9, 33))]
    prompts.append(list(prompts[-1]))
    return [Request(str(index), prompt, sampling) for index, prompt in enumerate(prompts)]


Answers = dict[str, list[int]]


def all_at_once(engine: Engine, requests: list[Request]) -> Answers:
    return generate(engine, requests)


def one_after_another(engine: Engine, requests: list[Request]) -> Answers:
    return {name: ids for request in requests for name, ids in generate(engine, [request]).items()}


def twice(engine: Engine, requests: list[Request]) -> Answers:
    """The second time counts: its prompts are in the cache, as far as there is one."""
    generate(engine, [replace(request, request_id=f"before-{request.request_id}") for request in requests])
    return generate(engine, requests)


def joining_in_random_company(engine: Engine, requests: list[Request]) -> Answers:
    """One more request every third step, last first, among others that come and are cancelled."""
    rng = random.Random(8)
    answers: Answers = {request.request_id: [] for request in requests}
    waiting, company, steps = list(requests), 0, 0
    while waiting or engine.has_work():
        if waiting and steps % 3 == 0:
            engine.add_request(waiting.pop())
        if waiting and rng.random() < 0.5:
            company += 1
            stranger = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 50))]
            engine.add_request(Request(f"stranger-{company}", stranger, requests[0].sampling))
        if company and rng.random() < 0.3:
            engine.abort(f"stranger-{rng.randint(1, company)}")
        for output in engine.step():
            if output.request_id in answers:
                assert output.token_id is not None
                answers[output.request_id].append(output.token_id)
        steps += 1
    engine.check_integrity()
    assert engine.stats().kv_blocks_used == 0
    return answers


def by_priority(engine: Engine, requests: list[Request]) -> Answers:
    return generate(engine, [replace(one, priority=-int(one.request_id) % 3) for one in requests])


def cuts(engine: Engine) -> bool:
    return isinstance(engine._pace, Crowded) and engine._pace.num_cut > 0


def never(_: Engine) -> bool:
    return True


def hits(engine: Engine) -> bool:
    return engine.stats().prefix_cache_hit_tokens_total > 0


def preempts(engine: Engine) -> bool:
    return engine.stats().num_preemptions_total > 0


def accepts(engine: Engine) -> bool:
    """Whether drafts stood."""
    counts = engine.stats().speculation
    return counts is not None and counts.num_accepted_tokens > 0


def knows_itself(engine: Engine) -> bool:
    """Whether drafts stood, all of them: those of a model that is its own draft model, if its keys are right."""
    counts = engine.stats().speculation
    return counts is not None and 0 < counts.num_draft_tokens == counts.num_accepted_tokens


def knows_itself_or_lacks_keys(engine: Engine) -> bool:
    """The same, unless a window has passed tokens of prompts before the draft model has read them."""
    return accepts(engine) if engine.model_config.longest_window is not None else knows_itself(engine)


def speculates(engine: Engine) -> bool:
    """Whether drafts stood, and others fell."""
    counts = engine.stats().speculation
    return counts is not None and 0 < counts.num_accepted_tokens < counts.num_draft_tokens


def flips(engine: Engine) -> bool:
    """Whether some steps checked what was proposed, and others did not."""
    counts = engine.stats().speculation
    return counts is not None and counts.num_checks > 0 and counts.skipped["no_gain"] > 0


@dataclass(frozen=True)
class Way:
    """How to run the requests, on which engine, and what must have happened meanwhile."""

    run: Callable[[Engine, list[Request]], Answers]
    config: dict[str, Any] = field(default_factory=dict)
    pool_blocks: int | None = None
    happened: Callable[[Engine], bool] = never
    ranks: int = 1
    execution: Callable[[], Execution] | None = None
    crowded: bool = False  # whether prompts that enter beside answers are cut into small chunks
    drafts: bool = False  # whether tokens are proposed
    drafts_itself: bool = False  # whether the model is its own draft model


NO_CACHE = {"enable_prefix_caching": False}
CHUNKED = {"max_num_batched_tokens": 17}
WAYS = {
    "one after another": Way(one_after_another, NO_CACHE),
    "all at once": Way(all_at_once, NO_CACHE),
    "by priority, two at a time": Way(by_priority, NO_CACHE | {"max_num_seqs": 2}),
    "in random company": Way(joining_in_random_company, NO_CACHE),
    "in chunks": Way(all_at_once, NO_CACHE | {"max_num_batched_tokens": 17}),
    "preempted": Way(all_at_once, NO_CACHE, pool_blocks=17, happened=preempts),
    "in scattered blocks": Way(all_at_once, NO_CACHE, pool_blocks=48),
    "one after another with the cache": Way(one_after_another, happened=hits),
    "all at once with the cache": Way(all_at_once, happened=hits),
    "twice with the cache": Way(twice, happened=hits),
    "in random company with the cache": Way(joining_in_random_company, happened=hits),
    "in chunks with the cache": Way(twice, {"max_num_batched_tokens": 17}, happened=hits),
    "preempted with the cache": Way(twice, pool_blocks=17, happened=lambda engine: preempts(engine) and hits(engine)),
}
SAMPLINGS = {
    "greedy": SamplingParams(NEW_TOKENS, temperature=0.0, ignore_eos=True),
    "seeded, filtered and penalised": SamplingParams(
        NEW_TOKENS,
        temperature=0.9,
        top_k=40,
        top_p=0.95,
        min_p=0.01,
        seed=77,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        logit_bias=((5, 2.0),),
        ignore_eos=True,
    ),
    # Most answers end by the value of a token, and none of this needs the host to know it before the next step.
    "seeded, filtered and stopped": SamplingParams(
        NEW_TOKENS,
        temperature=0.9,
        top_k=40,
        min_p=0.01,
        seed=78,
        min_tokens=3,
        logit_bias=((5, 2.0),),
        stop_token_ids=frozenset(range(30)),
    ),
}


EXECUTIONS: dict[str, Callable[[], Execution | None]] = {
    "plain": lambda: None,
    "overlapped": lambda: Execution(overlapped=True),
    "replayed": lambda: Execution(TapeRecorder()),
    "replayed and overlapped": lambda: Execution(TapeRecorder(), overlapped=True),
}
# The same where steps have time for a few tokens of prompts only.
CROWDED: dict[str, Callable[[], Execution]] = {
    "in small chunks": Execution,
    "in small chunks, replayed and overlapped": lambda: Execution(TapeRecorder(), overlapped=True),
}


# The same with drafts. Their answers are known to the drafter.
SPECULATING: dict[str, Callable[[], Execution]] = {
    "speculating": Execution,
    "speculating, in small chunks": Execution,
    "speculating, the governor flips": Execution,
    "speculating, replayed and overlapped": lambda: Execution(TapeRecorder(), overlapped=True),
}


@pytest.fixture(scope="module")
def alone(write_model: WriteModel) -> Callable[[str], Answers]:
    """The answers of requests that have a fresh engine without a cache to themselves."""
    known: dict[str, Answers] = {}

    def answers(sampling: str) -> Answers:
        if sampling not in known:
            config = RuntimeConfig(
                model=str(write_model()),
                served_model_name="test",
                device=Device.CPU,
                kv_cache_memory_bytes=1 << 20,
                enable_prefix_caching=False,
            )
            engine = Engine(config, lambda phase, message: None)
            known[sampling] = one_after_another(engine, make_requests(SAMPLINGS[sampling]))
        return known[sampling]

    return answers


def engine_in(
    circumstance: Way, make_engine: MakeEngine, folder: Path, execution: str, drafter: Drafter | None = None
) -> Engine:
    make_execution = (EXECUTIONS | CROWDED | SPECULATING)[execution]
    engine = make_engine(folder, execution=make_execution(), drafter=drafter, **circumstance.config)
    engine._pace = None  # what must have happened meanwhile may depend on no measured time
    if "in small chunks" in execution:
        crowd(engine)
    if "governor flips" in execution:
        assert engine._drafting is not None
        engine.set_speculation_governor(GovernorMode.ENFORCE)
        engine._drafting.lengths.governor = RandomLengths()
    if circumstance.pool_blocks is not None:
        caching = circumstance.config.get("enable_prefix_caching", True)
        shrink_pool(engine, circumstance.pool_blocks, enable_prefix_caching=caching)
    return engine
