"""The table of defaults in docs/planning.md is the one that the planner reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream_operator.api.workload import Profile, Tier
from millstream_operator.planning.tier_defaults import batch_defaults, usual_lengths

PAGE = Path(__file__).resolve().parents[4] / "docs" / "planning.md"
SECTION = PAGE.read_text(encoding="utf-8").split("## Defaults by tier and workload")[1].split("\n## ")[0]
ROWS = {
    name.strip(): cells
    for line in SECTION.splitlines()
    if line.startswith("| ") and "maxNumSeqs" not in line
    for cells in [[cell.strip() for cell in line.strip("| ").split("|")]]
    for name in cells[0].replace("tier ", "").replace("profile ", "").split(",")
}


def defaults_of(name: str) -> tuple[int, int, int]:
    tokens, seqs, memory = ROWS[name][1:4]
    return int(tokens), int(seqs), int(memory.removesuffix(" %"))


def test_the_page_names_every_tier_and_profile() -> None:
    assert set(ROWS) == {"neither", *Tier, *Profile}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_says_what_the_planner_takes(name: str) -> None:
    tier = Tier(name) if name in set(Tier) else None
    profile = Profile(name) if name in set(Profile) else None
    found = batch_defaults(tier, profile)
    limits = (found.max_num_batched_tokens, found.max_num_seqs, found.gpu_memory_utilization_percent)
    assert defaults_of(name) == limits
    if profile is not None or name == "neither":
        lengths = usual_lengths(profile)
        assert ROWS[name][4] == f"{lengths.input_tokens} + {lengths.output_tokens}"
        assert int(ROWS[name][5]) == lengths.max_model_len


def test_a_profile_knows_more_than_a_tier() -> None:
    assert batch_defaults(Tier.MID, Profile.CHAT) == batch_defaults(None, Profile.CHAT)
