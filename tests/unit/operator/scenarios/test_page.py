"""docs/what-happens-when.md shows what a simulated cluster shows; MILLSTREAM_WRITE_GOLDEN=1 writes it anew."""

from __future__ import annotations

import os
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.unit.operator.scenarios.situations import SITUATIONS

PAGE = Path(__file__).resolve().parents[4] / "docs" / "what-happens-when.md"
WIDTH = 118
# Conditions that are shown when they are True; Ready is always shown, Available when Ready is not.
ABNORMAL = (
    "RolloutBlocked",
    "ReplicasBlocked",
    "BudgetExceeded",
    "InsufficientReplicas",
    "PlanOutdated",
    "NameConflict",
    "Unauthenticated",
    "StatusIncomplete",
    "UnknownFields",
    "Reconciling",
    "Stalled",
)


def block_of(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- shown by {name} -->\n```text\n)(.*?)(```\n)", re.DOTALL)


def shown(status: dict[str, Any]) -> str:
    """The conditions that a person looks at, a message that was said already left out, and the newest decision."""
    conditions = {one["type"]: one for one in status["conditions"]}
    names = ["Ready", *(["Available"] if conditions["Ready"]["status"] != "True" else []), *ABNORMAL]
    lines, said = [], set[str]()
    for name in names:
        one = conditions.get(name)
        if one is None or (name in ABNORMAL and one["status"] != "True"):
            continue
        message = "" if one["message"] in said else one["message"]
        said.add(one["message"])
        lines += [f"{name}={one['status']}  {one['reason']}", *wrapped(message)]
    if status.get("plan", {}).get("summary"):
        lines.append(f"plan: {status['plan']['summary']}")
    if decisions := status.get("decisions"):
        lines += [f"newest decision: {decisions[0]['type']}", *wrapped(decisions[0]["message"])]
    return with_plain_names("\n".join(lines) + "\n")


def with_plain_names(text: str) -> str:
    """Revisions are named by a hash of all that was planned: the page calls them by letters, in their order."""
    names = dict.fromkeys(re.findall(r"demo-[0-9a-f]{10}", text))
    for name, letter in zip(names, "abcdef", strict=False):
        text = text.replace(name, f"demo-{letter * 10}")
    return text


def wrapped(message: str) -> list[str]:
    return textwrap.wrap(message, WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


@pytest.mark.parametrize("name", SITUATIONS)
async def test_the_page_shows_the_real_status(name: str) -> None:
    found = shown(await SITUATIONS[name]())
    text = PAGE.read_text()
    assert block_of(name).search(text), f"docs/what-happens-when.md has no block for {name}"
    if os.environ.get("MILLSTREAM_WRITE_GOLDEN"):
        PAGE.write_text(block_of(name).sub(lambda match: match[1] + found + match[3], text))
    assert block_of(name).search(PAGE.read_text())[2] == found  # type: ignore[index]


def test_the_page_shows_no_status_that_no_situation_makes() -> None:
    named = re.findall(r"<!-- shown by ([a-z-]+) -->", PAGE.read_text())
    assert sorted(named) == sorted(SITUATIONS)
