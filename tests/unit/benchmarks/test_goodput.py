"""The picture of goodput is that of the saved results, and the governor is on their envelope."""

from __future__ import annotations

import json

from benchmarks.goodput import ACCEPTANCES, BATCHES, LENGTHS, PICTURE, RESULT, cell
from benchmarks.goodput_plot import svg

FOUND = json.loads(RESULT.read_text(encoding="utf-8"))


def test_the_picture_is_drawn_from_the_saved_results() -> None:
    assert PICTURE.read_text(encoding="utf-8") == svg(FOUND), "run `python -m benchmarks.goodput --save`"


def test_every_acceptance_batch_and_length_is_there() -> None:
    assert [(one["acceptance"], one["batch"]) for one in FOUND["cells"]] == [
        (acceptance, batch) for acceptance in ACCEPTANCES for batch in BATCHES
    ]
    assert all([*one["ratios"]] == [str(length) for length in LENGTHS] for one in FOUND["cells"])


def test_the_governor_is_on_the_envelope() -> None:
    """No drafts at all are one of the choices: their ratio is 1."""
    for one in FOUND["cells"]:
        assert one["governor"] >= 0.96 * max(1.0, *one["ratios"].values()), one


def test_a_cell_is_simulated() -> None:
    found = cell(0.9, 1, answers=2)
    assert found["ratios"]["1"] > 1.4
    assert found["ratios"]["4"] > found["ratios"]["2"] > found["ratios"]["1"]
    assert found["governor_drafts_per_decode"] > 3
