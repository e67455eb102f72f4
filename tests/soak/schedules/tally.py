"""What many schedules found together, also across runs that were interrupted."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.soak.schedules.findings import Findings
from tests.soak.schedules.schedule import Settings

COUNTERS = ("counts", "wrong", "near_ties", "met", "executions", "models", "parameters", "drafts")
OF_DRAFTS = ("compared requests", "compared tokens", "drafts that stood", "drafts that fell")  # by what drafts


@dataclass
class Tally:
    """Sums, and every defect.

    Attributes:
        seconds: of all processes together.
        wrong: defects by kind.
        near_ties: by the token that is one, how often it was met.
        met: by circumstance, the schedules that met it.
        parameters: that compared requests asked for.
        drafts: by "drafter | count", of the schedules that draft.
        resident_mib: memory of the process after each chunk.
    """

    runs: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    near_ties: Counter[str] = field(default_factory=Counter)
    met: Counter[str] = field(default_factory=Counter)
    executions: Counter[str] = field(default_factory=Counter)
    models: Counter[str] = field(default_factory=Counter)
    parameters: Counter[str] = field(default_factory=Counter)
    drafts: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)
    resident_mib: list[float] = field(default_factory=list)

    def add(self, number: int, settings: Settings, findings: Findings) -> None:
        """Count one schedule."""
        self.runs += 1
        self.counts.update(findings.counts)
        self.wrong.update(str(one.kind) for one in findings.wrong)
        self.near_ties.update(f"{settings.model}/{one.request}/{one.position}" for one in findings.near_ties)
        self.met.update(name for name, count in findings.counts.items() if count)
        self.executions[settings.execution] += 1
        self.models[settings.model] += 1
        self.parameters.update(findings.parameters)
        if settings.max_draft_tokens is not None:
            of_kind = {"schedules": 1} | {name: findings.counts[name] for name in OF_DRAFTS}
            self.drafts.update({f"{settings.drafter_name} | {name}": count for name, count in of_kind.items()})
        if findings.wrong:
            text = [f"{one.kind}: {one.text}" for one in findings.wrong]
            self.failures.append({"number": number, "settings": asdict(settings), "wrong": text})

    def merge(self, other: Tally) -> None:
        """Add what another found."""
        self.runs += other.runs
        self.seconds += other.seconds
        for name in COUNTERS:
            getattr(self, name).update(getattr(other, name))
        self.failures += other.failures
        self.resident_mib += other.resident_mib

    def by_draft(self) -> dict[str, dict[str, int]]:
        """The counts of `drafts` by what drafts."""
        found: dict[str, dict[str, int]] = {}
        for key, count in self.drafts.items():
            kind, _, name = key.partition(" | ")
            found.setdefault(kind, {})[name] = count
        return dict(sorted(found.items()))


class TallyFile:
    """Tallies of chunks, a line each. `identity`: of the run; lines of others are ignored."""

    def __init__(self, path: Path | None, identity: str) -> None:
        self._path, self._identity = path, identity

    def read(self) -> dict[str, Tally]:
        """By chunk."""
        if self._path is None or not self._path.exists():
            return {}
        entries = [json.loads(line) for line in self._path.read_text().splitlines()]
        return {one["chunk"]: _tally(one["tally"]) for one in entries if one["identity"] == self._identity}

    def add(self, chunk: str, tally: Tally) -> None:
        """Append the tally of a chunk."""
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"identity": self._identity, "chunk": chunk, "tally": vars(tally)}) + "\n")


def _tally(values: dict[str, Any]) -> Tally:
    tally = Tally()
    for name, value in values.items():
        setattr(tally, name, Counter(value) if name in COUNTERS else value)
    return tally
