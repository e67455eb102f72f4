"""What a decode step takes, by its number of rows.

    seconds(rows) = scale × (1 + growth × rows)

The growth is a property of the model and the machine: it is measured once, when the engine warms up. The scale follows
what was timed of late: longer contexts and other processes make all decode steps slower. Pure: no torch, no clock.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

STEPS_REMEMBERED = 5
LEAST_FIXED_SHARE = 0.1  # of a decode step of one row: reading the weights, whatever two noisy times seem to say


class DecodeTimes:
    """See above. `growth`: by which each row makes a step longer, as a share of one without rows."""

    def __init__(self, growth: float = 0.0) -> None:
        self._growth = growth
        self._scales: deque[float] = deque(maxlen=STEPS_REMEMBERED)

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from a decode step."""
        self._scales.append(seconds / self.relative(rows))

    def clear(self) -> None:
        """Forget all steps, not the growth."""
        self._scales.clear()

    def relative(self, rows: int) -> float:
        """Its time over the scale."""
        return 1 + self._growth * rows

    def scale(self) -> float:
        """The median of the last steps, in seconds; 0 where none was timed, so that prompts seem to cost more."""
        return statistics.median(self._scales) if self._scales else 0.0

    def seconds(self, rows: int) -> float:
        """What a decode step of so many rows is expected to take."""
        return self.scale() * self.relative(rows)


def growth_of(seconds_by_rows: Mapping[int, float]) -> float:
    """Return the growth: the line through the fewest and the most rows. 0 where only one number was timed."""
    fewest, most = min(seconds_by_rows, default=0), max(seconds_by_rows, default=0)
    if fewest == most:
        return 0.0
    first = seconds_by_rows[fewest]
    slope = max(0.0, (seconds_by_rows[most] - first) / (most - fewest))
    return slope / max(first - slope * fewest, LEAST_FIXED_SHARE * first)
