"""Drafts change no token: some are right, some wrong and some no tokens at all, in a row or in a tree.

Every way of running of `tests/support/ways.py`, by drafters that know the answers, by a draft model and by an EAGLE
head. The governor may flip at random.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.draft_pool import wrong_draft_blocks
from tests.support.drafters import OftenRight
from tests.support.drafting_engines import DRAFT_MODEL, EAGLE, MEDUSA_TREE, counts
from tests.support.eagle_heads import EagleReference, WriteHead, watch_drafts
from tests.support.engines import MakeEngine, WriteModel
from tests.support.medusa_heads import write_medusa_heads
from tests.support.pairs import every_pair
from tests.support.tree_drafters import OftenOnTheTree, count_moved
from tests.support.ways import (
    SAMPLINGS,
    SPECULATING,
    VOCABULARY,
    WAYS,
    Answers,
    engine_in,
    flips,
    knows_itself,
    make_requests,
    speculates,
)

pytestmark = [pytest.mark.usefixtures("one_thread", "drafts_catch_up_by_fixed_chunks"), pytest.mark.deep]


@pytest.mark.matrix("way")
@pytest.mark.parametrize(("way", "execution", "sampling"), every_pair(WAYS, SPECULATING, SAMPLINGS))
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


@pytest.mark.matrix("draft")
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
        found = counts(engine)
        assert found.num_accepted_tokens < 0.3 * found.num_draft_tokens, "random weights know nothing"


@pytest.fixture(scope="module")
def eagle_reference(write_model: WriteModel, write_head: WriteHead) -> EagleReference:
    """It knows again what it was asked in another way."""
    return EagleReference(write_model(), write_head(write_model()))


@pytest.mark.matrix
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
    found = counts(engine)
    assert found.num_draft_tokens > 100


@pytest.mark.deep
@pytest.mark.matrix("way")
@pytest.mark.parametrize(
    ("way", "execution", "sampling"),
    every_pair(WAYS, ["speculating", "speculating, in small chunks", "speculating, the governor flips"], SAMPLINGS),
)
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
