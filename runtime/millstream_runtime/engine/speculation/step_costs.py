"""What a decode step takes, by its drafts per decode, for one bucket of batch sizes. Pure: no torch, no clock.

    drafts per decode    0      1      2      3      4
    seconds            1.3      ?      ?      ?    2.4     measured at knots, a line between them

A step whose drafts per decode lie between two knots moves both, by its share of each (normalised least mean squares).
All other knots move by a part of the same ratio: what makes steps slower is mostly another process or longer contexts,
which does so at every length. So a knot that was timed long ago stays comparable with one that is timed all the time.
Each draft costs about as much as the one before it, so knots with drafts are drawn towards the line that fits them
best: the less a knot was timed, the more.

Behind the last measured knot the line goes on. Where only steps without drafts were timed, drafts are taken to make a
step as many times slower as in another batch; without one, each counts as much as a step.
"""

from __future__ import annotations

import math

# Of a step's deviation: what every knot learns, and what the knots that it touches learn on top of it.
SHARED_RATE, OWN_RATE = 0.08, 0.04
LEAST_SECONDS = 1e-9  # of a step: a coarse clock says 0, and ratios of times are formed
FIRST_STEPS = 4  # are averaged instead
MOST_DEVIATION = 0.3  # of what is known: a step that another process held up teaches little
FIT_STEPS = 16.0  # as many steps as the fitted line counts at each knot
MOST_WEIGHT = 50.0  # steps that a knot remembers, about 2 / OWN_RATE
LINE_STEPS = 4  # for which the line of knots that are all timed is kept: one step hardly changes what is compared


class StepCosts:
    """See above. `max_draft_tokens`: the last knot.

    Attributes:
        other: of another batch size, for what was not timed here.
        num_steps: that were observed.
    """

    def __init__(self, max_draft_tokens: int, other: StepCosts | None = None) -> None:
        """`other`: see above."""
        self.other = other
        self._knots: list[float | None] = [None] * (max_draft_tokens + 1)
        self._weights = [0.0] * (max_draft_tokens + 1)  # steps that each knot has seen, by their share
        self._last_steps = [0] * (max_draft_tokens + 1)
        self.num_steps = 0
        self._line: list[float] | None = None  # `line`, for LINE_STEPS at most
        self._line_step = 0  # the step it was computed behind

    def is_timed(self, drafts_per_decode: int) -> bool:
        """Whether this knot has seen enough steps to be believed."""
        return self._weights[drafts_per_decode] >= FIRST_STEPS

    @property
    def knows_drafts(self) -> bool:
        """Whether steps without drafts were timed, and steps with them."""
        return self._knots[0] is not None and any(one is not None for one in self._knots[1:])

    def age_steps(self, drafts_per_decode: int) -> int:
        """How many steps of this bucket were timed since this knot was last seen."""
        return self.num_steps - self._last_steps[drafts_per_decode]

    def observe(self, drafts_per_decode: float, seconds: float) -> None:
        """Learn from a step that had decodes alone."""
        self.num_steps += 1
        seconds = max(LEAST_SECONDS, seconds)
        low = math.floor(drafts_per_decode)
        share = drafts_per_decode - low
        touched = {low: 1 - share, low + 1: share} if share else {low: 1.0}
        expected = self._begin(touched, drafts_per_decode, seconds)
        deviation = min(seconds - expected, MOST_DEVIATION * expected)
        is_timed = all(self._weights[knot] >= FIRST_STEPS for knot in touched)
        if not is_timed or self.num_steps - self._line_step >= LINE_STEPS:
            self._line = None
        if is_timed:
            shared = 1 + SHARED_RATE * deviation / expected
            self._knots = [None if one is None else one * shared for one in self._knots]
        norm = sum(weight * weight for weight in touched.values())
        for knot, weight in touched.items():
            known = self._knots[knot]
            if known is None:
                continue
            # The first steps of a knot may have been held up too, so a quicker one counts half.
            is_new = self._weights[knot] < FIRST_STEPS
            rate = max(OWN_RATE, 1 / (1 + self._weights[knot]), 0.5 if is_new and deviation < 0 else 0.0)
            self._knots[knot] = max(known + rate * deviation * weight / norm, seconds * 1e-3)
            self._weights[knot] += weight
            if weight >= 0.5:
                self._last_steps[knot] = self.num_steps

    def seconds(self, drafts_per_decode: float) -> float:
        """What a step is expected to take; 0 where nothing was timed."""
        line, low = self.line(), math.floor(drafts_per_decode)
        share = drafts_per_decode - low
        return line[low] + share * (line[low + 1] - line[low]) if share else line[low]

    def line(self) -> list[float]:
        """`seconds` at all knots."""
        if self._line is None:
            known = [one for one in self._knots if one is not None]
            if len(known) < len(self._knots):
                known = [self._measured(knot) for knot in range(len(self._knots))]
            self._line, self._line_step = self._drawn_to_fit(known), self.num_steps
        return self._line

    def _drawn_to_fit(self, measured: list[float]) -> list[float]:
        """Knots with drafts, each drawn towards the straight line through those that were timed."""
        timed = [
            (knot, min(weight, MOST_WEIGHT), measured[knot])
            for knot, weight in enumerate(self._weights)
            if knot and weight > 0
        ]
        if len(timed) < 2:
            return measured
        total = sum(weight for _, weight, _ in timed)
        middle = sum(knot * weight for knot, weight, _ in timed) / total
        level = sum(seconds * weight for _, weight, seconds in timed) / total
        spread = sum(weight * (knot - middle) ** 2 for knot, weight, _ in timed)
        slope = sum(weight * (knot - middle) * seconds for knot, weight, seconds in timed) / spread
        drawn = measured[:1]
        for knot in range(1, len(measured)):
            weight = min(self._weights[knot], MOST_WEIGHT)
            fitted = level + slope * (knot - middle)
            part = FIT_STEPS / (FIT_STEPS + weight) if fitted > 0 else 0.0
            drawn.append(measured[knot] + part * (fitted - measured[knot]))
        return drawn

    def _measured(self, drafts_per_decode: int) -> float:
        """What a step is expected to take by the knots around it."""
        low, high = self._around(drafts_per_decode)
        if low is None:
            return 0.0 if high is None else self._at(high)
        at_low = self._at(low)
        if drafts_per_decode == low:
            return at_low
        if high is not None:
            return at_low + (self._at(high) - at_low) * (drafts_per_decode - low) / (high - low)
        if not low and self.other is not None and self.other.knows_drafts:
            line = self.other.line()
            return at_low * min(line[drafts_per_decode] / line[0], 1.0 + drafts_per_decode)
        return at_low + self._slope_behind(low) * (drafts_per_decode - low)

    def _begin(self, touched: dict[int, float], drafts_per_decode: float, seconds: float) -> float:
        """Give knots that no step has touched a first value; return what this step was then expected to take."""
        if any(self._knots[knot] is None for knot in touched):
            base = self._knots[0]
            for knot in touched:
                if self._knots[knot] is None:
                    at_base = seconds if base is None or not drafts_per_decode else base
                    part = knot / drafts_per_decode if drafts_per_decode else 0.0
                    self._knots[knot] = max(at_base + (seconds - at_base) * part, seconds * 1e-3)
        return sum(self._at(knot) * weight for knot, weight in touched.items())

    def _around(self, drafts_per_decode: float) -> tuple[int | None, int | None]:
        """The nearest measured knots: at or below, and at or above."""
        low = high = None
        for knot, seconds in enumerate(self._knots):
            if seconds is None:
                continue
            if knot <= drafts_per_decode:
                low = knot
            if knot >= drafts_per_decode:
                high = knot
                break
        return low, high

    def _slope_behind(self, last: int) -> float:
        """Seconds per draft behind the last measured knot: as its segment, or as the line from the first if steeper."""
        if not last:
            return self._at(0)
        base = self._knots[0]
        before = [knot for knot in range(last) if self._knots[knot] is not None]
        if base is None or not before:
            return self._at(last) / (1 + last)
        of_segment = (self._at(last) - self._at(before[-1])) / (last - before[-1])
        return max(0.0, of_segment, (self._at(last) - base) / last)

    def _at(self, knot: int) -> float:
        return self._knots[knot] or 0.0
