"""The stages of each tier, and how long they are expected to take. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

from hack.cluster.steps import seconds_text
from tests.times.file import Seconds


class Command(StrEnum):
    """What a user asks for: one tier of the tests, by the word that pytest's `--tier` takes."""

    QUICK = "quick"
    SAMPLE = "sample"
    REST = "rest"
    WHOLE = "whole"


# Targets of the Makefile, in order. The rest comes after a quick run, which left the environment and the cluster.
_EVERYTHING = ("venv", "lint", "unit", "cluster-up", "images", "e2e", "faults")
STAGES: Mapping[Command, tuple[str, ...]] = {
    Command.QUICK: ("venv", "lint", "unit", "cluster-up", "images", "e2e"),
    Command.SAMPLE: _EVERYTHING,
    Command.REST: ("unit", "e2e", "faults"),
    Command.WHOLE: _EVERYTHING,
}
MAKE_TARGETS: Mapping[Command, str] = {
    Command.QUICK: "make test",
    Command.SAMPLE: "make test-all",
    Command.REST: "make test-rest",
    Command.WHOLE: "make test-all ALL=1",
}


def heading(stages: Sequence[str], number: int, last_time: Mapping[str, Seconds]) -> str:
    """One line above a stage: which one it is, how long it took last time, and how long all that is left took."""
    stage = stages[number]
    words = [f"== make {stage} (stage {number + 1} of {len(stages)}"]
    if stage in last_time:
        words.append(f"; last time {seconds_text(last_time[stage].wall)}")
    if all(name in last_time for name in stages[number:]):
        words.append(f"; {seconds_text(sum(last_time[name].wall for name in stages[number:]))} to go")
    return "".join([*words, ")"])


def expectation(stages: Sequence[str], last_time: Mapping[str, Seconds]) -> str:
    """One line above a run: how long it takes, as far as the last run says."""
    known = [last_time[stage].wall for stage in stages if stage in last_time]
    if not known:
        return "How long it takes is not known here before the first run; docs/testing.md says what was measured."
    if len(known) < len(stages):
        missing = ", ".join(stage for stage in stages if stage not in last_time)
        return f"It takes more than {seconds_text(sum(known))}: no times are known of {missing}."
    return f"It took {seconds_text(sum(known))} last time."
