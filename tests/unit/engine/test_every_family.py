"""Every model family answers as `transformers` does, whatever could treat families differently: ways, ranks, drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from millstream_runtime.distributed.leader import Leader
from millstream_runtime.engine.execution.execution_mode import Execution
from millstream_runtime.engine.request import Request, SamplingParams
from tests.support.crowded import crowd
from tests.support.drafters import OftenRight
from tests.support.drafting_engines import DRAFT_MODEL
from tests.support.eager_recorder import EagerRecorder
from tests.support.engines import MakeEngine, WriteModel
from tests.support.family_cases import CASES, UNEVEN_HEADS, Models
from tests.support.small_pool import shrink_pool
from tests.support.tiny_families import VOCABULARY as FAMILY_VOCABULARY
from tests.support.tiny_families import prompts_of, reference_answers
from tests.support.ways import (
    CHUNKED,
    NO_CACHE,
    Way,
    accepts,
    all_at_once,
    cuts,
    hits,
    knows_itself_or_lacks_keys,
    make_requests,
    one_after_another,
    preempts,
    speculates,
    twice,
)

pytestmark = [pytest.mark.usefixtures("one_thread", "drafts_catch_up_by_fixed_chunks"), pytest.mark.deep]


FAMILY_PROMPT_LENGTHS = (15, 18, 31)
FAMILY_NEW_TOKENS = 8
# The three begin with 1, 2 and 2 blocks and end with 2, 2 and 3: one more than there are.
TIGHT_POOL_BLOCKS = 6
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


@pytest.mark.matrix("family")
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
    engine._pace = None  # what must have happened meanwhile may depend on no measured time
    if circumstance.crowded:
        crowd(engine)
    if circumstance.pool_blocks is not None:
        shrink_pool(engine, circumstance.pool_blocks, frees_outside_window=False)
    sampling = SamplingParams(FAMILY_NEW_TOKENS, temperature=0.0, ignore_eos=True)
    answers = circumstance.run(engine, [Request(str(i), prompt, sampling) for i, prompt in enumerate(prompts)])
    assert list(answers.values()) == by_transformers(family)
    assert circumstance.happened(engine), "the circumstance did not arise: this proved nothing"
