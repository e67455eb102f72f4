"""What the engine promises whatever else goes on: a request's tokens depend on the request alone.

Each way of running below computes the same requests under another circumstance (company, chunks, cache hits,
preemptions, two ranks, ...). Whatever it is, every request must be answered as if it were alone in an engine without a
cache, and afterwards every KV block must be free. A way also says how to see that its circumstance really arose.

The first half holds this for many ways and samplings on one model, each also as a GPU would carry out steps: decodes
replayed from recordings (a tape stands in for CUDA graphs), steps overlapped, and both; and with drafts, of which some
are right, some wrong and some no tokens at all, in a row or in a tree, by a draft model, or by an EAGLE head. The
second half holds it for every model family and the ways that could treat families differently, against `transformers`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from millstream_runtime.config import GovernorMode, SpeculationMethod
from millstream_runtime.distributed.leader import Leader
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.execution.execution_mode import Execution
from millstream_runtime.engine.request import Request, SamplingParams
from millstream_runtime.engine.speculation import catching_up
from millstream_runtime.engine.speculation.drafter import Drafter
from tests.support.crowded import Crowded, crowd
from tests.support.draft_pool import wrong_draft_blocks
from tests.support.drafters import OftenRight, RandomLengths
from tests.support.eager_recorder import EagerRecorder
from tests.support.eagle_heads import EagleReference, WriteHead, watch_drafts
from tests.support.engines import MakeEngine, WriteModel, generate
from tests.support.family_cases import CASES, UNEVEN_HEADS, Models
from tests.support.medusa_heads import write_medusa_heads
from tests.support.small_pool import shrink_pool
from tests.support.tape_recorder import TapeRecorder
from tests.support.tiny_families import VOCABULARY as FAMILY_VOCABULARY
from tests.support.tiny_families import prompts_of, reference_answers
from tests.support.tree_drafters import TREE_TEXT, OftenOnTheTree, count_moved

pytestmark = pytest.mark.usefixtures("one_thread")
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
DRAFT_MODEL = {
    "speculation_method": SpeculationMethod.DRAFT_MODEL,
    "speculation_governor": GovernorMode.DISABLED,
}
MEDUSA_TREE = DRAFT_MODEL | {"speculation_method": SpeculationMethod.MEDUSA, "draft_tree": TREE_TEXT}
EAGLE = DRAFT_MODEL | {"speculation_method": SpeculationMethod.EAGLE}
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


@pytest.fixture(autouse=True)
def _chunks_of_fixed_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a draft model catches up with depends on no measured time."""
    monkeypatch.setattr(catching_up, "FIRST_TOKENS", 512)
    monkeypatch.setattr(catching_up, "CHUNK_SECONDS", 1e9)


@pytest.fixture(scope="module")
def alone(write_model: WriteModel) -> Callable[[str], Answers]:
    """The answers of requests that have a fresh engine without a cache to themselves."""
    known: dict[str, Answers] = {}

    def answers(sampling: str) -> Answers:
        if sampling not in known:
            from millstream_runtime.config import Device, RuntimeConfig

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


@pytest.mark.parametrize("execution", [*EXECUTIONS, *CROWDED])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("way", WAYS)
def test_a_request_is_answered_as_if_it_were_alone(
    way: str,
    sampling: str,
    execution: str,
    write_model: WriteModel,
    make_engine: MakeEngine,
    alone: Callable[[str], Answers],
) -> None:
    circumstance = WAYS[way]
    engine = engine_in(circumstance, make_engine, write_model(), execution)
    assert circumstance.run(engine, make_requests(SAMPLINGS[sampling])) == alone(sampling)
    if execution in CROWDED:
        assert cuts(engine) or circumstance.run is one_after_another, "a prompt alone is not cut"
    else:
        assert circumstance.happened(engine) or sampling == "seeded, filtered and stopped"
        assert engine.graphs is None or engine.graphs.replayed_steps > 0


@pytest.mark.parametrize("execution", SPECULATING)
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("way", WAYS)
def test_drafts_change_no_token(
    way: str,
    sampling: str,
    execution: str,
    write_model: WriteModel,
    make_engine: MakeEngine,
    alone: Callable[[str], Answers],
) -> None:
    circumstance, requests = WAYS[way], make_requests(SAMPLINGS[sampling])
    drafter = OftenRight.about(requests, alone(sampling), VOCABULARY)
    engine = engine_in(circumstance, make_engine, write_model(), execution, drafter)
    assert circumstance.run(engine, requests) == alone(sampling)
    assert flips(engine) if "governor flips" in execution else speculates(engine)
    if execution == "speculating":
        assert circumstance.happened(engine) or sampling == "seeded, filtered and stopped"


@pytest.mark.parametrize("draft", ["its own", "its own, the governor flips", "its own, replayed", "another"])
@pytest.mark.parametrize("way", WAYS)
def test_a_draft_model_changes_no_token(
    way: str, draft: str, write_model: WriteModel, make_engine: MakeEngine, alone: Callable[[str], Answers]
) -> None:
    circumstance, is_own = WAYS[way], draft != "another"
    sampling = "greedy" if is_own else "seeded, filtered and penalised"
    folder = write_model() if is_own else write_model(num_hidden_layers=1, intermediate_size=24)
    method = DRAFT_MODEL | {"draft_model": str(folder)}
    execution = {
        "its own, the governor flips": "speculating, the governor flips",
        "its own, replayed": "speculating, replayed and overlapped",
    }.get(draft, "speculating")
    engine = engine_in(
        replace(circumstance, config=circumstance.config | method), make_engine, write_model(), execution
    )
    assert circumstance.run(engine, make_requests(SAMPLINGS[sampling])) == alone(sampling)
    assert circumstance.happened(engine) or execution != "speculating", "other steps, other company"
    if is_own:
        assert knows_itself(engine)
        assert flips(engine) or execution != "speculating, the governor flips"
        assert wrong_draft_blocks(engine)[0] == []
    else:
        found = engine.stats().speculation
        assert found is not None
        assert found.num_accepted_tokens < 0.3 * found.num_draft_tokens, "random weights know nothing"


@pytest.fixture(scope="module")
def eagle_reference(write_model: WriteModel, write_head: WriteHead) -> EagleReference:
    """It knows again what it was asked in another way."""
    return EagleReference(write_model(), write_head(write_model()))


@pytest.mark.parametrize("way", WAYS)
def test_an_eagle_head_changes_no_token(
    way: str,
    write_model: WriteModel,
    write_head: WriteHead,
    make_engine: MakeEngine,
    alone: Callable[[str], Answers],
    eagle_reference: EagleReference,
) -> None:
    """What it drafts is what it would draft of each request alone, by transformers' layers."""
    circumstance, folder = WAYS[way], write_model()
    method = EAGLE | {"draft_model": str(write_head(folder))}
    engine = engine_in(replace(circumstance, config=circumstance.config | method), make_engine, folder, "speculating")
    wrong = watch_drafts(engine, eagle_reference)
    sampling = "seeded, filtered and penalised"
    assert circumstance.run(engine, make_requests(SAMPLINGS[sampling])) == alone(sampling)
    assert circumstance.happened(engine)
    assert wrong == []
    found = engine.stats().speculation
    assert found is not None
    assert found.num_draft_tokens > 100


@pytest.mark.parametrize(
    "execution", ["speculating", "speculating, in small chunks", "speculating, the governor flips"]
)
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("way", WAYS)
def test_a_tree_of_drafts_changes_no_token(
    way: str,
    sampling: str,
    execution: str,
    write_model: WriteModel,
    make_engine: MakeEngine,
    alone: Callable[[str], Answers],
    tmp_path: Path,
) -> None:
    """Right drafts are on any branch, so that their keys have to be moved; the cache has those that were moved."""
    circumstance, requests = WAYS[way], make_requests(SAMPLINGS[sampling])
    method = MEDUSA_TREE | {"draft_model": str(write_medusa_heads(tmp_path))}
    drafter = OftenOnTheTree.about(requests, alone(sampling), VOCABULARY)
    circumstance = replace(circumstance, config=circumstance.config | method)
    engine = engine_in(circumstance, make_engine, write_model(), execution, drafter)
    moved = count_moved(engine)
    assert circumstance.run(engine, requests) == alone(sampling)
    assert flips(engine) if "governor flips" in execution else speculates(engine)
    assert moved or sampling == "seeded, filtered and stopped"
    if execution == "speculating":
        assert circumstance.happened(engine) or sampling == "seeded, filtered and stopped"


@pytest.mark.parametrize("execution", [*EXECUTIONS, *CROWDED, *SPECULATING])
@pytest.mark.parametrize("seed", range(3))
def test_no_block_is_lost_whoever_ends_or_cancels_when(
    seed: int, execution: str, write_model: WriteModel, make_engine: MakeEngine
) -> None:
    requests = [one for name in SAMPLINGS for one in make_requests(SAMPLINGS[name])]
    drafter = OftenRight({}, VOCABULARY, seed) if execution in SPECULATING else None
    way = Way(all_at_once, {"max_num_batched_tokens": 24}, 20)
    engine = engine_in(way, make_engine, write_model(), execution, drafter)
    rng = random.Random(seed)
    live: list[str] = []
    for step in range(120):
        if rng.random() < 0.5:
            live.append(f"r{step}")
            engine.add_request(replace(rng.choice(requests), request_id=live[-1], priority=rng.randint(-1, 1)))
        if live and rng.random() < 0.3:
            engine.abort(live.pop(rng.randrange(len(live))))
        engine.step()
        engine.check_integrity()
    for name in live:
        engine.abort(name)
    engine.check_integrity()
    assert engine.step() == [], "what was in flight is dropped"
    engine.check_integrity()
    assert (engine.has_work(), engine.stats().kv_blocks_used) == (False, 0)


# Every family ---------------------------------------------------------------------------------------------------------

FAMILY_PROMPT_LENGTHS = (15, 18, 31)
FAMILY_NEW_TOKENS = 8
# The three begin with 1, 2 and 2 blocks and end with 2, 2 and 3: one more than there are.
CHUNKED, TIGHT_POOL_BLOCKS = {"max_num_batched_tokens": 17}, 6
FAMILY_WAYS = {
    "alone": Way(one_after_another, NO_CACHE),
    "batched": Way(all_at_once, NO_CACHE),
    "chunked": Way(all_at_once, NO_CACHE | CHUNKED),
    "with prefix hits": Way(twice, happened=hits),
    "preempted": Way(all_at_once, NO_CACHE, pool_blocks=TIGHT_POOL_BLOCKS, happened=preempts),
    "replayed and overlapped, with prefix hits": Way(
        twice, happened=hits, execution=lambda: Execution(EagerRecorder(), overlapped=True)
    ),
    "overlapped, preempted": Way(
        all_at_once, NO_CACHE, TIGHT_POOL_BLOCKS, preempts, execution=lambda: Execution(overlapped=True)
    ),
    "beside answers, in small chunks": Way(all_at_once, NO_CACHE, happened=cuts, crowded=True),
    "at TP 2, beside answers, in small chunks": Way(all_at_once, NO_CACHE, happened=cuts, ranks=2, crowded=True),
    "at TP 2, chunked, with prefix hits": Way(twice, CHUNKED, happened=hits, ranks=2),
    "at TP 2, preempted": Way(all_at_once, NO_CACHE, TIGHT_POOL_BLOCKS, happened=preempts, ranks=2),
    "speculating, with prefix hits": Way(twice, happened=lambda one: hits(one) and speculates(one), drafts=True),
    "speculating, preempted": Way(
        all_at_once,
        NO_CACHE,
        TIGHT_POOL_BLOCKS,
        happened=lambda one: preempts(one) and accepts(one),  # too few steps for drafts of both kinds in all
        drafts=True,
    ),
    "speculating at TP 2": Way(all_at_once, NO_CACHE, happened=speculates, ranks=2, drafts=True),
    "drafting by a model, with prefix hits": Way(
        twice, happened=lambda one: hits(one) and knows_itself_or_lacks_keys(one), drafts_itself=True
    ),
    "drafting by a model at TP 2": Way(
        all_at_once, NO_CACHE, happened=knows_itself_or_lacks_keys, ranks=2, drafts_itself=True
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module")
def by_transformers(models: Models) -> Callable[[str], list[list[int]]]:
    """The answers of `transformers.generate`, one prompt at a time."""
    known: dict[str, list[list[int]]] = {}

    def answers(family: str) -> list[list[int]]:
        if family not in known:
            prompts = prompts_of(FAMILY_PROMPT_LENGTHS)
            known[family] = reference_answers(models.reference(family), prompts, FAMILY_NEW_TOKENS)
        return known[family]

    return answers


@pytest.fixture(scope="module")
def pair() -> Iterator[Leader]:
    """Two ranks over gloo, started once: they load one family after another."""
    leader = Leader(2, torch.device("cpu"))
    yield leader
    leader.close()


def test_two_ranks_penalise_as_one(write_model: WriteModel, make_engine: MakeEngine, pair: Leader) -> None:
    engine = make_engine(write_model(), rank_group=pair, tensor_parallel_size=2, max_num_batched_tokens=17)
    requests = make_requests(SamplingParams(12, temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4))
    single = make_engine(write_model(), max_num_batched_tokens=17)
    assert all_at_once(engine, requests) == all_at_once(single, requests)


@pytest.mark.parametrize("way", FAMILY_WAYS)
@pytest.mark.parametrize("family", CASES)
def test_every_family_answers_like_transformers(
    family: str,
    way: str,
    models: Models,
    by_transformers: Callable[[str], list[list[int]]],
    make_engine: MakeEngine,
    request: pytest.FixtureRequest,
) -> None:
    circumstance = FAMILY_WAYS[way]
    if circumstance.ranks > 1 and family in UNEVEN_HEADS:
        pytest.skip("its heads do not divide by two, and such a size is refused: see test_tensor_parallel.py")
    rank_group = request.getfixturevalue("pair") if circumstance.ranks > 1 else None
    ranks = {"rank_group": rank_group, "tensor_parallel_size": circumstance.ranks} if rank_group else {}
    execution = circumstance.execution() if circumstance.execution else None
    prompts, drafter = prompts_of(FAMILY_PROMPT_LENGTHS), None
    if circumstance.drafts:
        known = dict(zip(map(tuple, prompts), by_transformers(family), strict=True))
        drafter = OftenRight(known, FAMILY_VOCABULARY)
    folder = models.folder(family)
    draft = DRAFT_MODEL | {"draft_model": str(folder)} if circumstance.drafts_itself else {}
    engine = make_engine(folder, execution=execution, drafter=drafter, **circumstance.config, **ranks, **draft)
    if circumstance.crowded:
        crowd(engine)
    if circumstance.pool_blocks is not None:
        shrink_pool(engine, circumstance.pool_blocks, frees_outside_window=False)
    sampling = SamplingParams(FAMILY_NEW_TOKENS, temperature=0.0, ignore_eos=True)
    answers = circumstance.run(engine, [Request(str(i), prompt, sampling) for i, prompt in enumerate(prompts)])
    assert list(answers.values()) == by_transformers(family)
    assert circumstance.happened(engine), "the circumstance did not arise: this proved nothing"
