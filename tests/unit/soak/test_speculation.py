"""The soak of speculation: what it draws, what it counts, and that it finds a token which a draft has changed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from millstream_runtime.draft_tree import DraftTree
from millstream_runtime.engine.accepting import Accepting
from millstream_runtime.engine.execution.model_runner import ModelRunner, Sampled
from tests.soak.results import KINDS_OF_DRAFTS
from tests.soak.schedules.draft_kinds import EAGLE_HEADS, HEADS, MEDUSA_HEADS, DraftKind
from tests.soak.schedules.findings import Findings, Kind
from tests.soak.schedules.plan import SPECULATION
from tests.soak.schedules.proof import prove
from tests.soak.schedules.schedule import EXECUTIONS, REPEATING, Arrive, Drain, Settings
from tests.soak.schedules.speculating import TREE_SIZES, draw_speculating, draw_tree
from tests.soak.schedules.tally import Tally, TallyFile
from tests.soak.schedules.tiny_models import DAMAGED, MODELS
from tests.soak.schedules.worker import Worker

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.deep]
FEW_RANKS = (2, 5)  # an EAGLE-3 head proposes no more than the tokens of its own vocabulary
CHUNK, COUNT = SPECULATION.chunk, 100 * len(DraftKind)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    one = Worker(tmp_path_factory.mktemp("models"), 1, SPECULATION.processors_of, SPECULATION.sampled_share)
    yield one
    one.close()


def settings_of(count: int) -> list[Settings]:
    return [draw_speculating(1, number).settings for number in range(count)]


@pytest.mark.quick
def test_every_kind_meets_every_circumstance_it_can() -> None:
    drawn = settings_of(COUNT)
    assert all(one.max_draft_tokens for one in drawn)
    assert Counter(one.drafts for one in drawn) == dict.fromkeys(DraftKind, COUNT // len(DraftKind))
    assert {one.model for one in drawn} == MODELS.keys() | DAMAGED.keys()
    assert not any(MODELS[one.model].packed for one in drawn if one.drafts in HEADS), "heads larger than their model"
    assert {one.execution for one in drawn} == EXECUTIONS.keys()
    assert {one.model for one in drawn if one.drafts is DraftKind.NAN_EMBEDDING} == DAMAGED.keys()
    two_ranks = {one.drafts for one in drawn if one.execution == "on two ranks"}
    assert two_ranks == {*DraftKind} - HEADS - {DraftKind.NAN_EMBEDDING}
    assert {(one.governor_flips, one.governor_decides) for one in drawn} == {
        *((True, False), (False, True), (False, False))
    }
    assert draw_speculating(1, 7) == draw_speculating(1, 7)


@pytest.mark.quick
def test_the_goal_names_as_many_kinds_as_there_are() -> None:
    drawn = settings_of(2 * len(DraftKind))
    assert len({one.drafter_name for one in drawn}) == KINDS_OF_DRAFTS
    assert {one.drafts for one in drawn if one.draft_tree is not None} == MEDUSA_HEADS


@pytest.mark.quick
def test_trees_are_drawn_by_chance_of_their_own() -> None:
    drawn = settings_of(1500)
    trees = [DraftTree.parse(one.draft_tree) for one in drawn if one.draft_tree is not None]
    assert not any(one.reads_in_place for one in drawn if one.draft_tree is not None), "no kernel for it"
    assert len(trees) == 1500 // len(DraftKind)
    assert {len(one.nodes) for one in trees} == {*TREE_SIZES}
    assert {one.num_levels for one in trees} == {1, 2, 3}


def on_one_rank(kind: DraftKind, *, tree: bool = False) -> int:
    """The first schedule of a kind that needs no second process, with a tree of drafts or without."""
    numbers = range([*DraftKind].index(kind), 1000, len(DraftKind))
    drawn = ((number, draw_speculating(1, number).settings) for number in numbers)
    return next(
        number
        for number, settings in drawn
        if settings.execution != "on two ranks" and (settings.draft_tree is not None) is tree
    )


@pytest.mark.matrix
@pytest.mark.parametrize("kind", DraftKind)
def test_no_kind_changes_a_token(kind: DraftKind, worker: Worker) -> None:
    findings = worker.run(draw_speculating(1, on_one_rank(kind)))
    assert findings.wrong == []
    assert findings.counts["compared requests"] > 0
    assert findings.counts["compared tokens"] > 0


def test_no_tree_changes_a_token(worker: Worker) -> None:
    moved = 0
    for number in range(on_one_rank(DraftKind.MEDUSA, tree=True), 300, 2 * len(DraftKind)):
        findings = worker.run(draw_speculating(1, number))
        assert findings.wrong == []
        moved += findings.counts["paths of trees that moved"]
    assert moved > 0


@pytest.mark.matrix
@pytest.mark.parametrize("kind", sorted(EAGLE_HEADS))
def test_no_tree_of_an_eagle_head_changes_a_token(kind: DraftKind, worker: Worker) -> None:
    rng, checked = random.Random(kind), 0
    for number in range(on_one_rank(kind), 3 * len(DraftKind), len(DraftKind)):
        schedule = draw_speculating(1, number)
        settings = replace(schedule.settings, draft_tree=draw_tree(rng, FEW_RANKS), reads_in_place=False)
        findings = worker.run(replace(schedule, settings=settings))
        assert findings.wrong == []
        checked += findings.counts["drafts that stood"] + findings.counts["drafts that fell"]
    assert checked > 0


def test_keys_of_a_tree_that_stay_where_they_are_are_found(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRunner, "keep_drafts", lambda *_: None)
    numbers = range(on_one_rank(DraftKind.MEDUSA, tree=True), 300, 2 * len(DraftKind))
    assert any(worker.run(draw_speculating(1, number)).wrong for number in numbers)


def test_a_check_that_trusts_its_first_draft_is_found(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    accept = Accepting.accept_run

    def trusting(accepting: Accepting, sequence: object, run: list[Sampled]) -> list[object]:
        first = run[0]._replace(token_id=sequence.draft_ids[0])  # type: ignore[attr-defined]
        return accept(accepting, sequence, [first, *run[1:]])  # type: ignore[arg-type, return-value]

    monkeypatch.setattr(Accepting, "accept_run", trusting)
    schedule = draw_speculating(1, on_one_rank(DraftKind.ALWAYS_THE_SAME))
    checked = replace(schedule, settings=replace(schedule.settings, governor_flips=False, governor_decides=False))
    assert Kind.TOKEN in {one.kind for one in worker.run(checked).wrong}


def test_a_run_ends_when_enough_requests_are_compared(tmp_path: Path) -> None:
    path, lines = tmp_path / "state.jsonl", list[str]()
    for chunk in range(3):
        tally = Tally(seconds=2.0)
        for number in range(chunk * CHUNK, chunk * CHUNK + CHUNK):
            found = Findings(
                counts=Counter({"compared requests": 4, "compared tokens": 9}), parameters=Counter(top_k=2)
            )
            tally.add(number, draw_speculating(1, number).settings, found)
        TallyFile(path, "commit 1").add(f"{chunk * CHUNK}-{chunk * CHUNK + CHUNK}", tally)
    result = prove(
        count=3 * CHUNK, seed=1, state=path, version="commit", plan=SPECULATION, requests=8 * CHUNK, say=lines.append
    )
    assert result["counts"]["compared requests"] == 8 * CHUNK, "the third chunk is not needed"
    assert result["parameters"] == {"top_k": 4 * CHUNK}
    assert sum(one["compared tokens"] for one in result["by_draft"].values()) == 18 * CHUNK
    assert lines == [f"  {8 * CHUNK} of {8 * CHUNK} were run before"]


def test_prompts_for_n_grams_repeat_themselves_so_that_drafts_are_checked(worker: Worker) -> None:
    numbers = [
        one for one in range(3 * len(DraftKind)) if draw_speculating(1, one).settings.drafts is DraftKind.N_GRAMS
    ]
    checked = 0
    for number in numbers:
        schedule = draw_speculating(1, number)
        requests = {one.request for one in schedule.actions if isinstance(one, Arrive)}
        assert requests <= {*REPEATING}
        settings = replace(schedule.settings, execution="plain", governor_flips=False, governor_decides=False)
        findings = worker.run(replace(schedule, settings=settings))
        assert findings.wrong == []
        checked += findings.counts["drafts that stood"] + findings.counts["drafts that fell"]
    assert checked >= 5 * len(numbers)


@pytest.mark.matrix
@pytest.mark.parametrize("name", [name for name, one in MODELS.items() if one.packed is None and not one.has_experts])
def test_every_model_that_can_be_quantized_drafts_for_itself(name: str, worker: Worker) -> None:
    """Its drafts are checked, but where its context ends before the prompts do."""
    number = on_one_rank(DraftKind.QUANTIZED)
    schedule = draw_speculating(1, number)
    settings = replace(schedule.settings, model=name, governor_flips=False, governor_decides=False)
    arrivals = tuple(Arrive(f"r{one}", one, 12) for one in range(3))
    findings = worker.run(replace(schedule, settings=settings, actions=(*arrivals, Drain())))
    assert findings.wrong == []
    checked = findings.counts["drafts that stood"] + findings.counts["drafts that fell"]
    assert checked > 0 or "longrope" in name
