"""The progress of a Job in words: rounded, and none from a body that says nothing sensible."""

from __future__ import annotations

import pytest

from millstream_operator.probing.step_progress import read_step_progress


def body(stage: object, done: object, total: object, **more: object) -> dict[str, object]:
    return {"phase": "Working", "progress": {"stage": stage, "done": done, "total": total}} | more


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (body("layers", 0, 32), "layer 1 of 32"),
        (body("layers", 11.4, 32, eta_seconds=2381.0), "layer 12 of 32, about 40 min left"),
        (body("layers", 32, 32, eta_seconds=0.0), "layer 32 of 32"),
        (body("quality", 37, 100), "quality 35 %"),
        (body("quality", 1, 3, eta_seconds=45), "quality 30 %, about 1 min left"),
        (body("quality", 1, 3, eta_seconds=541), "quality 30 %, about 10 min left"),
        (body("layers", 1, 80, eta_seconds=7000.0), "layer 2 of 80, about 120 min left"),
        (body("layers", 1, 80, eta_seconds=20_000), "layer 2 of 80, about 6 h left"),
    ],
)
def test_what_a_command_reports_is_told_in_steps(report: object, words: str) -> None:
    assert read_step_progress(report) == words


@pytest.mark.parametrize(
    "report",
    [
        None,
        [],
        "layers",
        {"phase": "Downloading", "progress": {"done_bytes": 1, "total_bytes": 2}},
        {"progress": "layers"},
        body("Layers <b>", 1, 2),
        body("layers" * 10, 1, 2),
        body(7, 1, 2),
        body("layers", -1, 2),
        body("layers", 3, 2),
        body("layers", True, 2),
        body("layers", 1, 0),
        body("layers", "1", 2),
        body("layers", float("nan"), 2),
        body("layers", 1, 1e9),
    ],
)
def test_anything_else_is_no_progress(report: object) -> None:
    assert read_step_progress(report) is None


@pytest.mark.parametrize("eta", [-1, float("inf"), float("nan"), "60", True, 1e12])
def test_an_impossible_time_is_left_out(eta: object) -> None:
    assert read_step_progress(body("layers", 1, 2, eta_seconds=eta)) == "layer 2 of 2"
