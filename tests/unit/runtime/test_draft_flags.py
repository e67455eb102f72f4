"""What a refusal of drafts says to leave out is all that asks for them."""

from __future__ import annotations

import re
from itertools import chain

import pytest

from millstream_runtime.config import SpeculationMethod
from millstream_runtime.config_flags import draft_flags
from tests.support.runtime_args import from_args

GIVEN = {
    "--speculation-method and --draft-model": ["--speculation-method", "EAGLE", "--draft-model", "d"],
    "--speculation-method and --max-draft-tokens": ["--speculation-method", "NGram", "--max-draft-tokens", "3"],
    "--speculation-method": ["--speculation-method", "NGram"],
    "--speculation-method, --draft-model and --draft-tree": [
        *("--speculation-method", "Medusa", "--draft-model", "d"),
        *("--draft-tree", "[(0,)]"),
    ],
    "--speculation-method, --draft-model, --max-draft-tokens and --speculation-acceptance": [
        *("--speculation-method", "DraftModel", "--draft-model", "d"),
        *("--max-draft-tokens", "2", "--speculation-acceptance", "Distribution"),
    ],
    "": [],
}


@pytest.mark.parametrize("named", GIVEN)
def test_without_the_flags_that_are_named_the_model_is_served_without_drafts(named: str) -> None:
    assert draft_flags(from_args(["--model", "m", *GIVEN[named]])) == named
    left_out = re.findall(r"--[a-z-]+", named)
    pairs = zip(GIVEN[named][::2], GIVEN[named][1::2], strict=True)
    kept = [pair for pair in pairs if pair[0] not in left_out]
    config = from_args(["--model", "m", *chain.from_iterable(kept)])
    assert config.speculation_method is SpeculationMethod.DISABLED
