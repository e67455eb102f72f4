"""Step times of a real engine, for the simulator of the governor: another process's load and all.

`benchmarks.record_steps` writes them. A simulated step takes one of the recorded times of its drafts per decode;
between two recorded numbers it takes a time between theirs, of the same rank.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATH = Path(__file__).parent / "results" / "recorded_steps.json"


@dataclass(frozen=True)
class RecordedSteps:
    """Steps of one workload, always of as many requests.

    Attributes:
        acceptance: probability that a first draft stands.
        is_free: proposals cost next to nothing, as those of n-grams.
        seconds: by drafts per decode, ascending both.
    """

    name: str
    num_requests: int
    acceptance: float
    is_free: bool
    by_length: dict[int, list[float]]

    def seconds(self, num_decodes: int, lengths: Seq[int], rng: random.Random) -> float:
        """See `governor_simulator.Costs.seconds`."""
        return self.at(sum(lengths) / num_decodes, rng)

    def at(self, drafts_per_decode: float, rng: random.Random) -> float:
        """Return the seconds of a step with that many drafts per decode."""
        low = max(one for one in self.by_length if one <= drafts_per_decode)
        high = min((one for one in self.by_length if one >= drafts_per_decode), default=low)
        rank = rng.random()
        at_low, at_high = (_of_rank(self.by_length[one], rank) for one in (low, high))
        return at_low if low == high else at_low + (at_high - at_low) * (drafts_per_decode - low) / (high - low)


def read(path: Path = PATH) -> list[RecordedSteps]:
    """Return all recorded workloads."""
    return [_workload(one) for one in json.loads(path.read_text())["workloads"]]


def _workload(one: dict[str, Any]) -> RecordedSteps:
    by_length = {int(length): [ms / 1000 for ms in sorted(found)] for length, found in one["milliseconds"].items()}
    return RecordedSteps(one["name"], one["num_requests"], one["acceptance"], one["is_free"], by_length)


def _of_rank(values: Seq[float], rank: float) -> float:
    return values[int(rank * len(values))]
