"""Schedules are drawn alike everywhere, and a run that was interrupted goes on where it was."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.soak.schedules.findings import Difference, Findings, Kind
from tests.soak.schedules.plan import SCHEDULES
from tests.soak.schedules.proof import at_most, prove
from tests.soak.schedules.schedule import EXECUTIONS, Drain, NoMemory, draw, may_have_two_ranks
from tests.soak.schedules.tally import Tally, TallyFile
from tests.soak.schedules.tiny_models import MODELS

CHUNK = SCHEDULES.chunk


def test_a_number_is_always_the_same_schedule() -> None:
    assert draw(1, 5) == draw(1, 5)
    assert draw(1, 5) != draw(2, 5)


def test_a_thousand_schedules_reach_every_model_and_execution() -> None:
    drawn = [draw(1, number) for number in range(1000)]
    assert {one.settings.model for one in drawn} == MODELS.keys()
    assert {one.settings.execution for one in drawn} == EXECUTIONS.keys()
    assert all(isinstance(one.actions[-1], Drain) for one in drawn)
    assert Counter(type(action).__name__ for one in drawn for action in one.actions).keys() == {
        *("Arrive", "Cancel", "Step", "Drain", "Spoil", "NoMemory", "Target"),
    }


def test_every_execution_drafts_and_goes_without() -> None:
    drawn = [draw(1, number).settings for number in range(3000)]
    found = {(one.execution, one.max_draft_tokens is not None) for one in drawn}
    assert found == {(execution, drafts) for execution in EXECUTIONS for drafts in (True, False)}
    packed = [one for one in drawn if one.execution == "on two ranks" and not may_have_two_ranks(MODELS[one.model])]
    assert packed == []


def test_a_step_without_memory_is_never_drawn_on_two_ranks() -> None:
    """It would end the engine: its ranks wait for each other."""
    for number in range(3000):
        schedule = draw(1, number)
        if schedule.settings.execution == "on two ranks":
            assert not any(isinstance(action, NoMemory) for action in schedule.actions)


def test_what_is_drawn_later_leaves_the_rest_of_older_schedules_as_it_was() -> None:
    """The digest is that of the version before there were drafts in every execution."""
    digest = hashlib.sha256()
    for number in range(300):
        schedule, engine = draw(1, number), draw(1, number).settings
        sizes = engine.block_size_tokens, engine.max_num_seqs, engine.max_num_batched_tokens, engine.max_model_len
        known = schedule.number, schedule.seed, schedule.actions, engine.model, *sizes, engine.spare_blocks
        digest.update(repr(known).encode())
    assert digest.hexdigest() == "24f504af6678a56e5b146a13e54a50f06932d79d8b7fc4faaec358e888a52202"


def findings_of(number: int) -> Findings:
    found = Findings(counts=Counter(tokens=7))
    if number == 3:
        found.add(Kind.TOKEN, "token 4 of request 9 is 5, and alone 6")
        found.near_ties.append(Difference(9, 4, 5, 6))
    return found


def test_chunks_that_are_done_are_not_run_again(tmp_path: Path) -> None:
    path = tmp_path / "state.jsonl"
    for chunk in range(2):
        tally = Tally(seconds=2.0)
        for number in range(chunk * CHUNK, chunk * CHUNK + CHUNK):
            tally.add(number, draw(1, number).settings, findings_of(number))
        TallyFile(path, "commit 1").add(f"{chunk * CHUNK}-{chunk * CHUNK + CHUNK}", tally)
    lines: list[str] = []
    result = prove(count=2 * CHUNK, seed=1, state=path, version="commit", say=lines.append)
    assert (result["runs"], result["equal"], result["interrupted"]) == (2 * CHUNK, 2 * CHUNK - 1, False)
    assert result["wrong"] == {"differing token": 1}
    assert result["near_ties"] == {"tokens": 1, "times": 1}
    assert result["counts"] == {"tokens": 14 * CHUNK}
    assert [one["number"] for one in result["failures"]] == [3]
    assert lines == [f"  {2 * CHUNK} of {2 * CHUNK} were run before"]
    assert TallyFile(path, "another commit 1").read() == {}


def compute_for_ever() -> None:
    while True:
        pass


def test_a_schedule_that_computes_or_waits_for_ever_ends_but_not_one_that_waits_for_a_processor() -> None:
    with at_most(0.5, 600):  # of all threads of this process: others of it may compute a little meanwhile
        time.sleep(0.8)
    with pytest.raises(TimeoutError, match="of a processor"), at_most(0.05, 600):
        compute_for_ever()
    with pytest.raises(TimeoutError, match=r"not done after 0\.1 s$"), at_most(600, 0.1):
        time.sleep(600)
