"""A goal that is not reached is reported, in every kind of result."""

from __future__ import annotations

from typing import Any

import pytest

from tests.soak.load import percentile
from tests.soak.results import KINDS_OF_DRAFTS, MET, SPECULATED, missed

FAILURE = {"scenario": "create", "fault": "500", "number": 3, "struck": "PATCH /x", "differences": ["no Service"]}
CHECKED = {"compared requests": 9, "drafts that stood": 15, "drafts that fell": 15}
GOOD: dict[str, dict[str, Any]] = {
    "kills": {"runs": 3, "converged": 3, "failures": [], "crashes": [], "orphans": []},
    "transitions": {"runs": 60, "equal": 60, "reached_a_rendered_change": 30, "failures": [], "crashes": []},
    "schedules": {
        "runs": 100,
        "equal": 100,
        "wrong": {},
        "schedules_that_met": dict.fromkeys(MET, 5),
        "failures": [],
        "crashes": [],
    },
    "speculation": {
        "runs": 100,
        "equal": 100,
        "wrong": {},
        "schedules_that_met": dict.fromkeys(SPECULATED, 5),
        "counts": {"compared requests": 2001, "paths of trees that moved": 7},
        "requests asked": 2000,
        "by_draft": {f"kind {one}": CHECKED for one in range(KINDS_OF_DRAFTS)},
        "failures": [],
        "crashes": [],
    },
    "outage": {
        "recovered_seconds": 3,
        "same_process": True,
        "healthy_meanwhile": True,
        "healthy_after": True,
        "crashes": [],
        "problems": [],
    },
    "deletions": {"writes_per_deployment": 1.0, "crashes": [], "problems": []},
    "releases": {
        "objects": 10,
        "left_to_others": 10,
        "events_of_the_second": 10,
        "writes_of_the_second": [],
        "writes_of_the_first_at_rest": [],
        "owners": {"first-0001/millstream": 10},
        "owner": "first-0001/millstream",
        "pods_before_the_change": "serve on",
        "crashes": [],
    },
    "leaders": {"slowest_takeover_seconds": 16, "writes_out_of_turn": [], "crashes": [], "problems": []},
    "scale": {
        "ratio": 1.5,
        "restart": {"steady_seconds": 12, "writes": 0},
        "idle": {"writes": 0},
        "idle after the restart": {"writes": 0},
        "spec_change_to_first_write": {"p99_seconds": 0.1},
        "deleted_child_repaired": {"p99_seconds": 0.1},
        "edited_child_repaired": {"p99_seconds": 0.1},
        "memory_mib": {"idle": {"most": 200}},
        "deleted_without_operator": {"orphans": []},
        "crashes": [],
    },
}
BAD: list[tuple[str, dict[str, Any]]] = [
    ("kills", {"failures": [FAILURE]}),
    ("kills", {"crashes": ["exit code 1"]}),
    ("kills", {"orphans": ["run-1: services/demo"]}),
    ("transitions", {"equal": 59, "failures": [{"number": 7, "differences": ["no Service"]}]}),
    ("transitions", {"reached_a_rendered_change": 29}),
    ("schedules", {"equal": 99, "wrong": {"leak": 1}, "failures": [{"number": 7, "wrong": ["leak: blocks"]}]}),
    ("schedules", {"crashes": ["a process ended"]}),
    ("schedules", {"schedules_that_met": {**GOOD["schedules"]["schedules_that_met"], "preemptions": 1}}),
    (
        "speculation",
        {"equal": 99, "wrong": {"differing token": 1}, "failures": [{"number": 7, "wrong": ["token 3 is 4"]}]},
    ),
    ("speculation", {"counts": {"compared requests": 1999, "paths of trees that moved": 7}}),
    ("speculation", {"by_draft": {"n-grams": CHECKED}}),
    ("speculation", {"by_draft": GOOD["speculation"]["by_draft"] | {"kind 3": CHECKED | {"drafts that fell": 14}}}),
    ("speculation", {"by_draft": GOOD["speculation"]["by_draft"] | {"kind 3": {"compared requests": 9}}}),
    ("speculation", {"counts": {"compared requests": 2001}}),
    ("speculation", {"schedules_that_met": {**GOOD["speculation"]["schedules_that_met"], "preemptions": 1}}),
    ("outage", {"recovered_seconds": 31}),
    ("outage", {"same_process": False}),
    ("deletions", {"writes_per_deployment": 1.5}),
    ("deletions", {"problems": ["Deployments that ask for pods: {'llm-0003'}, and not set()"]}),
    ("releases", {"writes_of_the_second": ["patch services shared-0000/llm-00"]}),
    ("releases", {"writes_of_the_first_at_rest": ["patch networkpolicies shared-0000/llm-00"]}),
    ("releases", {"events_of_the_second": 20}),
    ("releases", {"left_to_others": 9}),
    ("releases", {"owners": {"first-0001/millstream": 9, "second-0002/millstream": 1}}),
    ("releases", {"pods_before_the_change": "were replaced"}),
    ("leaders", {"slowest_takeover_seconds": 20.5}),
    ("leaders", {"writes_out_of_turn": ["one wrote"]}),
    ("scale", {"ratio": 2.01}),
    ("scale", {"idle": {"writes": 1}}),
    ("scale", {"restart": {"steady_seconds": 31, "writes": 0}}),
    ("scale", {"memory_mib": {"idle": {"most": 301}}}),
    ("scale", {"edited_child_repaired": {"p99_seconds": 5.1}}),
]


@pytest.mark.parametrize("name", GOOD)
def test_a_good_result_misses_nothing(name: str) -> None:
    assert missed(name, GOOD[name]) == []


@pytest.mark.parametrize(("name", "instead"), BAD)
def test_a_bad_result_is_told(name: str, instead: dict[str, Any]) -> None:
    assert len(missed(name, GOOD[name] | instead)) == 1


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(n) for n in range(1, 201)]
    assert (percentile(values, 50), percentile(values, 99), percentile([3.0], 99)) == (100.0, 198.0, 3.0)
