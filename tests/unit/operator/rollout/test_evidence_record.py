"""The evidence of a shift comes back from its text, and a text of anybody else is no evidence."""

from __future__ import annotations

import json

import pytest

from millstream_operator.rollout.traffic_shift.evidence import (
    Evidence,
    PodCounters,
    Reading,
    look,
    stage_begins,
    waited,
)
from millstream_operator.rollout.traffic_shift.evidence_record import MAX_CHARACTERS, evidence_text, read_evidence
from millstream_operator.workloads.traffic import Histogram, Traffic
from tests.unit.operator.rollout.test_traffic_judgement import after, traffic


def test_what_is_written_is_read() -> None:
    assert read_evidence(evidence_text(Evidence())) == Evidence()
    found = waited(after(traffic(123, 4, 5), traffic(700, 1), looks=3), 12.5)
    text = evidence_text(found)
    again = read_evidence(text)
    assert again is not None
    assert evidence_text(again) == text
    assert (again.new, again.pods, again.stage is not None) == (found.new, found.pods, True)


def test_evidence_of_the_most_pods_fits() -> None:
    edges = (*(float(number) for number in range(1, 18)), float("inf"))
    histogram = Histogram(edges, (10**9,) * len(edges))
    busy = Traffic(10**9, 10**9, 10**9, histogram, 1.23456789e8, histogram, histogram, 3, 1.7900000001e9)
    readings = [
        Reading({*uids}, {uid: PodCounters(busy, 2) for uid in uids})
        for uids in ([f"{side}-{'0' * 36}-{number}" for number in range(8)] for side in ("new", "old"))
    ]
    text = evidence_text(stage_begins(look(Evidence(), *readings), 25))
    assert len(text) < MAX_CHARACTERS
    assert read_evidence(text) is not None


GOOD = json.loads(evidence_text(after(traffic(5), traffic(5))))


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "null",
        "[]",
        "{}",
        "[" * 10_000,
        json.dumps(GOOD | {"format": 2}),
        json.dumps(GOOD | {"logs": [[0.0] * 4] * 3}),
        json.dumps(GOOD | {"logs": [[float("inf")] * 5] * 3}),
        json.dumps(GOOD | {"new": [1, 2, 3]}),
        json.dumps(GOOD | {"bounds": []}),
        json.dumps(GOOD | {"pods": {"a": [0, [-1, 0, 0, [0], 0.0, [0], [0], 0, 0.0]]}}),
        json.dumps(GOOD | {"counts": ["x", 0, 0]}),
        json.dumps(GOOD | {"unproven": 7}),
        json.dumps(GOOD) + " " * MAX_CHARACTERS,
    ],
)
def test_what_the_operator_cannot_have_written_is_no_evidence(text: str | None) -> None:
    assert read_evidence(text) is None
