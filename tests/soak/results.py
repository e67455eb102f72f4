"""What a run found, as JSON with the hardware it ran on, and the goals it is held to."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

Result = dict[str, Any]
MANY = 50  # runs, from which on a share says something
FOLDER = Path(__file__).resolve().parent / "results"
OPERATOR = (":/operator", ":/crds", ":/charts")  # what was run, by git's paths
MET = (  # by enough schedules
    "cancelled",
    "given up",
    "preemptions",
    "prefix hit tokens",
    "replayed steps",
    "cut prompts",
    "drafts that stood",
    "drafts that fell",
)
RUNTIME = (":/runtime", ":/tests/soak/schedules", ":/tests/support")
SPECULATED = (
    "preemptions",
    "prefix hit tokens",
    "drafts that stood",
    "drafts that fell",
    "decodes without drafts: no_gain",
)
LEAST_CHECKED_DRAFTS = 30  # of each kind, in 2,000 requests; in fewer requests fewer
KINDS_OF_DRAFTS = 18  # see tests/soak/schedules/draft_kinds.py, which this page does not import; two also as trees
SHOWN = 5  # transitions that differ, in full; all of them are in the JSON


def hardware() -> Result:
    """The machine, in numbers that explain the others."""
    cpus = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    memory = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    return {
        "cpu": cpus[0] if cpus else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(int(memory.split()[1]) / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average_at_the_end": [round(load, 2) for load in os.getloadavg()],
    }


def commit(sources: tuple[str, ...] = OPERATOR) -> str:
    """The commit that ran, with `-dirty` where what was run differs from it; "" without git."""
    try:
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", *sources)
        return _git("rev-parse", "--short=9", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def last_change(sources: tuple[str, ...]) -> str:
    """The last commit that changed what is run, with `-dirty` as in `commit`; "" without git."""
    try:
        return _git("log", "-1", "--format=%H", "--", *sources) + (
            "-dirty" if commit(sources).endswith("-dirty") else ""
        )
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(*words: str) -> str:
    command = ["git", "-C", str(FOLDER.parent), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()


def write(
    name: str, command: str, seconds: float, result: Result, missed: list[str], sources: tuple[str, ...] = OPERATOR
) -> Path:
    """`tests/soak/results/<name>.json`."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.json"
    content = {
        "what": name,
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": commit(sources),
        "hardware": hardware(),
        "took_seconds": round(seconds),
        "goals_missed": missed,
        "result": result,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def missed(name: str, result: Result) -> list[str]:
    """The goals that a result does not reach, in a sentence each."""
    failures = [f"crashed: {crash}" for crash in result.get("crashes", ())]
    failures += [f"left behind: {orphan}" for orphan in result.get("orphans", ())]
    failures += [f"problem: {problem}" for problem in result.get("problems", ())]
    failures += [f"interrupted after {result['runs']} runs"] if result.get("interrupted") else []
    failures += _GOALS.get(name, _converged)(result)
    return failures


def _converged(result: Result) -> list[str]:
    return [
        f"did not converge: {one['scenario']}, {one['fault']} at {one['number']} ({one['struck']}): "
        + "; ".join(one["differences"])
        for one in result["failures"]
    ]


def _transitions(result: Result) -> list[str]:
    bad, reached = result["runs"] - result["equal"], result["reached_a_rendered_change"]
    shown = [f"transition {one['number']}: {', '.join(one['differences'])}" for one in result["failures"][:SHOWN]]
    told = "; ".join([f"{bad} of {result['runs']} transitions differ from a fresh create", *shown])
    failures = [told] if bad else []
    if result["runs"] >= MANY and reached < result["runs"] / 2:
        failures.append(f"{reached} of {result['runs']} transitions reached a rendered change, fewer than half")
    return failures


def _schedules(result: Result) -> list[str]:
    return _differing(result, MET)


def _speculation(result: Result) -> list[str]:
    failures = _differing(result, SPECULATED)
    compared, asked = result["counts"].get("compared requests", 0), result["requests asked"]
    if compared < asked:
        failures.append(f"{compared} of {asked} requests were compared")
    if result["runs"] >= MANY:
        kinds = [one for one, counts in result["by_draft"].items() if counts["compared requests"]]
        if len(kinds) < KINDS_OF_DRAFTS:
            failures.append(f"{len(kinds)} of {KINDS_OF_DRAFTS} kinds of drafts were met")
        least = LEAST_CHECKED_DRAFTS * min(1.0, asked / 2000)
        for kind, counts in result["by_draft"].items():
            checked = counts.get("drafts that stood", 0) + counts.get("drafts that fell", 0)
            if checked < least:
                failures.append(f"{checked} drafts of {kind} were checked, fewer than {least:g}")
        if not result["counts"].get("paths of trees that moved"):
            failures.append("no draft of a tree stood but in its first place, so no key moved")
    return failures


def _differing(result: Result, circumstances: tuple[str, ...]) -> list[str]:
    bad = result["runs"] - result["equal"]
    kinds = ", ".join(f"{count} × {kind}" for kind, count in result["wrong"].items())
    shown = [f"schedule {one['number']}: {one['wrong'][0]}" for one in result["failures"][:SHOWN]]
    failures = ["; ".join([f"{bad} of {result['runs']} schedules are wrong ({kinds})", *shown])] if bad else []
    if result["runs"] >= MANY:
        met = result["schedules_that_met"]
        failures += [
            f"{met.get(name, 0)} of {result['runs']} schedules met {name}, too few to say something"
            for name in circumstances
            if met.get(name, 0) < result["runs"] / 50
        ]
    return failures


def _outage(result: Result) -> list[str]:
    return _over(result, {"recovered_seconds": 30}) + [
        f"{what} does not hold" for what in ("same_process", "healthy_meanwhile", "healthy_after") if not result[what]
    ]


def _leaders(result: Result) -> list[str]:
    failures = _over(result, {"slowest_takeover_seconds": 20})
    return failures + [f"two writers: {write}" for write in result["writes_out_of_turn"]]


def _scale(result: Result) -> list[str]:
    failures = _over(result, {"ratio": 2})
    failures += _over(result["restart"], {"steady_seconds": 30, "writes": 0}, "restart ")
    failures += _over(result["idle"], {"writes": 0}, "idle ")
    failures += _over(result["idle after the restart"], {"writes": 0}, "idle after the restart ")
    failures += _over(result["spec_change_to_first_write"], {"p99_seconds": 1}, "spec change to first write ")
    for word in ("deleted", "edited"):
        failures += _over(result[f"{word}_child_repaired"], {"p99_seconds": 5}, f"{word} child repaired ")
    most = max(memory["most"] for memory in result["memory_mib"].values())
    failures += _over({"most": most}, {"most": 300}, "memory in MiB ")
    return failures + [f"left behind: {orphan}" for orphan in result["deleted_without_operator"]["orphans"]]


def _deletions(result: Result) -> list[str]:
    """`problems` has the rest."""
    return _over(result, {"writes_per_deployment": 1})


def _two_releases(result: Result) -> list[str]:
    failures = [f"the second release wrote: {write}" for write in result["writes_of_the_second"]]
    failures += [f"at rest the first release wrote: {write}" for write in result["writes_of_the_first_at_rest"]]
    wanted = {
        "left_to_others": result["objects"],
        "events_of_the_second": result["objects"],
        "owners": {result["owner"]: result["objects"]},
        "pods_before_the_change": "serve on",
    }
    return failures + [
        f"{name} is {result[name]}, not {value}" for name, value in wanted.items() if result[name] != value
    ]


def _over(result: Result, limits: dict[str, float], word: str = "") -> list[str]:
    return [f"{word}{name} is {result[name]}, over {limit}" for name, limit in limits.items() if result[name] > limit]


_GOALS = {
    "schedules": _schedules,
    "speculation": _speculation,
    "transitions": _transitions,
    "outage": _outage,
    "leaders": _leaders,
    "deletions": _deletions,
    "releases": _two_releases,
    "scale": _scale,
}
