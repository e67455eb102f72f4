"""How much a run does where a time bounds it: decided once by measuring, and kept, so that a resumed run does the same.

`--steps`, or neither, needs no clock: then the same inputs give the same bytes. With `--minutes` the decisions are part
of the work folder, and the same decisions give the same bytes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from millstream_runtime.model_output.resumable_folder import ResumableFolder

ANSWERS_SHARE = 0.4  # of the minutes, after which no more prompts are answered
TRAINING_SHARE = 0.9  # of the minutes; what is left judges


@dataclass(slots=True)
class Decided:
    """None: not yet. `used_seconds`: of all runs so far."""

    num_shards: int | None = None
    steps: int | None = None
    used_seconds: float = 0.0


class RunPlan:
    """`minutes` None: no bound."""

    def __init__(self, work: ResumableFolder, minutes: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._work, self._path, self._clock, self._minutes = work, work.path / "plan.json", clock, minutes
        self.decided = work.read(self._path, _read) or Decided()
        self._began = clock()
        self._before = self.decided.used_seconds

    def may_answer_more(self) -> bool:
        """Whether another file of answers may begin."""
        return self._left_seconds(ANSWERS_SHARE) > 0

    def steps_within(self, step_seconds: Callable[[], float]) -> int | None:
        """Return how many steps the time allows, at least 1; None without a bound. `step_seconds` measures one."""
        if self._minutes is None:
            return None
        seconds = step_seconds()
        return max(1, int(self._left_seconds(TRAINING_SHARE) / max(seconds, 1e-6)))

    def save(self) -> None:
        """Keep what is decided, and the seconds used."""
        self.decided.used_seconds = self._used_seconds()
        self._work.write_text(self._path, json.dumps(asdict(self.decided)) + "\n")

    def _used_seconds(self) -> float:
        return self._before + self._clock() - self._began

    def _left_seconds(self, share: float) -> float:
        return float("inf") if self._minutes is None else 60 * share * self._minutes - self._used_seconds()


def _read(path: Path) -> Decided:
    return Decided(**json.loads(path.read_text(encoding="utf-8")))
