"""`python -m tests.soak.table`: write the tables of docs/reliability.md from the results. A test compares them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.soak.operator_process import ROOT
from tests.soak.results import FOLDER

PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- from tests/soak/results by `python -m tests.soak.table` -->", "<!-- end -->"
Document = dict[str, Any]
_SCENARIO_ORDER = (
    *("create", "update", "delete", "create, deleted meanwhile", "delete and create again", "repair", "start"),
    *("hub: create", "hub: update", "hub: roll back", "hub: delete and create again"),
)


def tables(found: dict[str, Document]) -> str:
    """Markdown of all results that there are."""
    parts = [_faults(found), _rest(found), _runs(found)]
    return "\n\n".join(part for part in parts if part)


def _faults(found: dict[str, Document]) -> str:
    """Faults × scenarios: how many of the runs converged, and the slowest of them."""
    cells: dict[tuple[str, str], str] = {}
    for name in ("kills", "faults", "starts"):
        for key, row in found.get(name, {}).get("result", {}).get("table", {}).items():
            scenario, _, fault = key.rpartition(": ")
            cells[fault, scenario] = f"{row['converged']} of {row['runs']}, {row['slowest_seconds']:.0f} s"
    faults = list(dict.fromkeys(fault for fault, _ in cells))
    scenarios = [name for name in _SCENARIO_ORDER if any(scenario == name for _, scenario in cells)]
    rows = [[f"**{fault}**", *(cells.get((fault, scenario), "–") for scenario in scenarios)] for fault in faults]
    return _markdown(["converged, slowest", *scenarios], rows) if cells else ""


def _rest(found: dict[str, Document]) -> str:
    rows: list[list[str]] = []
    if outage := found.get("outage", {}).get("result"):
        rows.append(
            [
                f"No API server for {outage['outage_seconds']:.0f} s: all caught up after it is back",
                "≤ 30 s, same process",
                f"{outage['recovered_seconds']} s, {'same' if outage['same_process'] else 'another'} process",
            ]
        )
    if leaders := found.get("leaders", {}).get("result"):
        slowest = "; ".join(f"{way} {max(s)} s" for way, s in leaders["takeover_seconds"].items() if s)
        rows.append(["Leader lost: first write of the next", "≤ 20 s", slowest])
        rows.append(
            [
                "Writes out of turn in the audit log",
                "0",
                f"{len(leaders['writes_out_of_turn'])} of {leaders['writes']} in {leaders['terms']} terms",
            ]
        )
    if ways := found.get("transitions", {}).get("result"):
        rows.append(["A → B → A and A → bad → A equal to a fresh create", "all", f"{ways['equal']} of {ways['runs']}"])
        if (reached := ways.get("reached_a_rendered_change")) is not None:
            rows.append(["Transitions whose spec in between was rendered", "≥ half", f"{reached} of {ways['runs']}"])
    if engine := found.get("schedules", {}).get("result"):
        rows += _schedules(engine)
    if speculation := found.get("speculation", {}).get("result"):
        rows += _speculation(speculation)
    if deleted := found.get("deletions", {}).get("result"):
        rows.append(
            [
                f"{deleted['objects']} deleted at once, without a garbage collector: all pods ended",
                "one write each",
                f"{deleted['pods_ended_seconds']} s, {deleted['writes_per_deployment']} writes each",
            ]
        )
    if releases := found.get("releases", {}).get("result"):
        rows.append(
            [
                f"{releases['objects']} objects of two releases for {releases['seconds']:.0f} s: writes of the second",
                "0",
                str(len(releases["writes_of_the_second"])),
            ]
        )
    if scale := found.get("scale", {}).get("result"):
        rows += _scale(scale)
    return _markdown(["what", "goal", "found"], rows) if rows else ""


def _schedules(result: Document) -> list[list[str]]:
    wrong, compared, ties = result["wrong"], result["counts"]["compared tokens"], result["near_ties"]
    differing, leaks = wrong.get("differing token", 0), wrong.get("leak", 0)
    return [
        [
            f"{result['runs']} random schedules of the engine: tokens that differ from those of the request alone",
            "0",
            f"{differing} of {compared} ({ties['tokens']} tokens are near-ties, met {ties['times']} times)",
        ],
        ["Leaks after these schedules; other defects", "0; 0", f"{leaks}; {sum(wrong.values()) - differing - leaks}"],
    ]


def _speculation(result: Document) -> list[list[str]]:
    wrong, counts, ties = result["wrong"], result["counts"], result["near_ties"]
    differing = wrong.get("differing token", 0)
    return [
        [
            f"{counts['compared requests']} requests with {len(result['by_draft'])} kinds of drafts: tokens that "
            "differ from those without drafts",
            "0",
            f"{differing} of {counts['compared tokens']} ({ties['tokens']} tokens are near-ties, met {ties['times']} "
            "times)",
        ],
        ["Other defects of these schedules", "0", str(sum(wrong.values()) - differing)],
    ]


def _scale(result: Document) -> list[list[str]]:
    many = result["objects"]["llmdeployments"]
    bare = " and ".join(f"{seconds:.0f} s" for seconds in result["bare_client_seconds"])
    idle, restart = result["idle"], result["restart"]
    return [
        [
            f"{many} applied at once: all {result['objects']['children']} children, against a bare client",
            "≤ 2 ×",
            f"{result['ratio']} × ({result['apply']['all_children_seconds']:.0f} s; the client: {bare})",
        ],
        [f"Idle for {idle['seconds']:.0f} s: writes", "0", str(idle["writes"])],
        ["Restart to steady", "≤ 30 s, 0 writes", f"{restart['steady_seconds']} s, {restart['writes']} writes"],
        ["Memory at most", "≤ 300 MB", f"{max(m['most'] for m in result['memory_mib'].values())} MiB"],
        *(
            [f"{word.replace('_', ' ').capitalize()}, p99", f"≤ {goal} s", f"{result[word]['p99_seconds']} s"]
            for word, goal in (
                ("spec_change_to_first_write", 1),
                ("deleted_child_repaired", 5),
                ("edited_child_repaired", 5),
            )
        ),
    ]


def _runs(found: dict[str, Document]) -> str:
    rows = [
        [
            f"[{name}](../tests/soak/results/{name}.json)",
            f"`{document['command']}`",
            document["date"],
            document.get("commit", ""),
            f"{document['hardware']['cpu']}, {document['hardware']['cores']} cores, load "
            f"{document['hardware']['load_average_at_the_end'][0]:.0f}",
            f"{document['took_seconds'] // 60} min",
            "; ".join(one.partition(";")[0] for one in document["goals_missed"]) or "none",
        ]
        for name, document in found.items()
    ]
    return _markdown(["result", "command", "date", "commit", "on", "took", "goals missed"], rows)


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def read() -> dict[str, Document]:
    """The results that are committed, by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(Path(FOLDER).glob("*.json"))}


def page(text: str, found: dict[str, Document]) -> str:
    """The page with its tables regenerated."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables(found)}\n\n{END}{after}"


def main() -> int:
    PAGE.write_text(page(PAGE.read_text(), read()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
