"""The table of all mutations: what killed each, and whether the quick tier and the day's sample have that case."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.mutations.kills import Verdict
from tests.mutations.tiers import Tiers
from tests.soak.results import commit, hardware

FILE = Path(__file__).resolve().parent / "results.json"
MUTATED = (":/operator", ":/runtime", ":/kernels", ":/cli", ":/charts", ":/crds", ":/requirements", ":/tests")
Results = dict[str, Any]


def results_of(verdicts: Sequence[Verdict], tiers: Tiers, seconds: float) -> Results:
    """What `FILE` holds."""
    mutants = [verdict.as_json(tiers.quick, tiers.sample) for verdict in verdicts]
    return {
        "command": "python -m tests.mutations",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": commit(MUTATED),
        "hardware": hardware(),
        "took_seconds": round(seconds),
        "matrix_day": tiers.day,
        "total": len(mutants),
        "killed": sum(mutant["killed_by"] is not None for mutant in mutants),
        "in_quick": sum(mutant["in_quick"] is True for mutant in mutants),
        "in_sample": sum(mutant["in_sample"] is True for mutant in mutants),
        "mutants": mutants,
    }


def write(results: Results) -> None:
    """Replace `FILE`."""
    FILE.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def markdown(results: Results) -> str:
    """The table, and below it the totals."""
    rows = ["| mutant | killed by | quick | sample |", "|---|---|---|---|"]
    for mutant in results["mutants"]:
        words = {True: "yes", False: "no"}
        killed_by = f"`{mutant['killed_by'].removeprefix('tests/unit/')}`" if mutant["killed_by"] else "**nothing**"
        cells = (f"`{mutant['file']}`: {mutant['trap']}", killed_by)
        flags = (words[mutant["in_quick"]], words[mutant["in_sample"]])
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in (*cells, *flags)) + " |")
    return "\n".join([*rows, "", totals(results)])


def totals(results: Results) -> str:
    """One line."""
    total, shares = results["total"], {}
    for name in ("in_quick", "in_sample"):
        shares[name] = f"{results[name]} ({results[name] / max(1, total):.0%})"
    return (
        f"{results['killed']} of {total} mutants are killed by the tests that they name. The quick tier kills "
        f"{shares['in_quick']}, the sample of day {results['matrix_day']} {shares['in_sample']}."
    )
