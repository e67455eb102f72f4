"""Whether the pods of a new revision answer worse than the old ones, and whether a stage has the evidence to end. Pure.

    errors             odds larger than the old pods', by evidence of 1 / 0.4 %
    restarts           more per pod than the old pods', by evidence of 1 / 0.1 %
    finish reasons     more answers end at their limit, by 20 percentage points, and where prompts and limits are
                       alike, by evidence of 1 / 0.1 %; fewer are no fault
    time per token     the mean over answers is above the objective, or above `factor` times the old pods', by evidence
                       of 1 / 0.1 % in each of four stages

These add up to 1 %: the most that a revision which is alike is rolled back with, over all metrics,
stages and looks together (`sequential_tests.py`). A stage passes when it has the opposite evidence: that errors are
rarer than in 3 % of the requests or than at three times the old pods' odds, and that the time per token is below its
limit. A revision that is beyond both passes a stage with a probability of 0.5 % at most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from millstream_operator.rollout.traffic_shift.evidence import BAD_RATE, GOOD_RATES, Evidence, StageEvidence
from millstream_operator.rollout.traffic_shift.sequential_tests import mean_evidence, mixture, rate_evidence
from millstream_operator.workloads.traffic import Traffic

MOST_STAGES = 4
ERRORS_ALPHA, RESTARTS_ALPHA, AT_LIMIT_ALPHA, TOKEN_TIME_ALPHA = 0.004, 0.001, 0.001, 0.004
MISS_ALPHA = 0.005  # of each: errors (half by their rate, half by the odds) and the time per token
LEAST_LENGTH_DIFFERENCE = 0.2
MOST_DISTANCE = 0.1  # between the distributions of prompts, and of limits, that are alike
LEAST_ANSWERS = 50  # of two tokens or more on a side, before times are compared


@dataclass(frozen=True, slots=True)
class Limits:
    """`objective_seconds`: `objectives.itl`, which wins; otherwise `factor` times the old pods' time per token."""

    objective_seconds: float | None = None
    factor: float = 2.0


@dataclass(frozen=True, slots=True)
class Needs:
    """What a stage still needs before it ends. `requests`: finished in its pods; `needed`: about how many its error
    rate needs, None where no number is enough. Empty `missing`: it has all of it."""

    requests: int
    needed: int | None
    missing: tuple[str, ...] = ()

    @property
    def are_met(self) -> bool:
        return not self.missing


def why_worse(evidence: Evidence, limits: Limits) -> str | None:
    """Return why the new pods are worse, as the end of a sentence; None where they are not."""
    new, old = evidence.new, evidence.old
    if _is_enough(mixture(evidence.errors), ERRORS_ALPHA):
        return f"{_share(new.error, new.finished)} of its requests ended with an error, of the old pods' " + _share(
            old.error, old.finished
        )
    if _is_enough(mixture(evidence.restarts), RESTARTS_ALPHA):
        return (
            f"its pods or their engines began anew {evidence.new_restarts} times, those of the old revision "
            f"{evidence.old_restarts} times"
        )
    if _is_enough(mixture(evidence.at_limit), AT_LIMIT_ALPHA) and _more_at_limit(new, old) and are_alike(new, old):
        return (
            f"{_share(new.length, new.complete)} of its answers ended at their limit of tokens, of the old pods' "
            f"{_share(old.length, old.complete)}, with like prompts and limits"
        )
    return _why_slower(evidence.stage, limits) if evidence.stage is not None else None


def needs(evidence: Evidence, limits: Limits) -> Needs:
    """Return what the stage still needs."""
    if (stage := evidence.stage) is None:
        return Needs(0, _needed_requests(0, 0), ("its pods to be ready",))
    new = stage.new
    needed, missing = _needed_requests(new.error, new.finished), []
    rate, odds = mixture(stage.few_errors), mixture(stage.like_the_old)
    if not _is_enough(rate, MISS_ALPHA / 2) and not _is_enough(odds, MISS_ALPHA / 2):
        missing.append("more requests, to tell its errors")
    if (times := _missing_times(stage, limits)) is not None:
        missing.append(times)
    return Needs(new.finished, needed, tuple(missing))


def in_words(evidence: Evidence) -> str:
    """Return what was compared, for the journal."""
    new, old, stage = evidence.new, evidence.old, evidence.stage
    if not new.finished:
        return "no request ended in its pods that could be read, so nothing was compared"
    times = [part.mean_token_seconds for part in ((stage.new, stage.old) if stage is not None else (new, old))]
    latency = (
        ", its times per token were not compared"
        if None in times
        else ", mean time per token {:.0f} ms and {:.0f} ms".format(*(1000 * (time or 0.0) for time in times))
    )
    return (
        f"errors in {_share(new.error, new.finished)} of its requests, in {_share(old.error, old.finished)} of the "
        f"old pods'{latency}"
    )


def are_alike(new: Traffic, old: Traffic) -> bool:
    """Whether prompts, and limits of tokens, are distributed alike; not where the pods do not report them."""
    parts = ((new.prompt_tokens, old.prompt_tokens), (new.max_tokens, old.max_tokens))
    for one, other in parts:
        if not one.count or not other.count:
            return False
        used = sum(1 for a, b in zip(one.counts, other.counts, strict=False) if a or b)
        noise = math.sqrt(used / (2 * math.pi) * (1 / one.count + 1 / other.count))
        if one.distance(other) > MOST_DISTANCE + noise:
            return False
    return True


def _needed_requests(errors: int, requests: int) -> int | None:
    """Return about how many requests show that errors are rarer than BAD_RATE, at the rate that was seen."""
    rate = errors / requests if requests else 0.0
    growth = max(
        rate * rate_evidence(1, 1, good, BAD_RATE) + (1 - rate) * rate_evidence(0, 1, good, BAD_RATE)
        for good in GOOD_RATES
    )
    if growth <= 0:
        return None
    return math.ceil((math.log(2 / MISS_ALPHA) + math.log(len(GOOD_RATES))) / growth)


def _more_at_limit(new: Traffic, old: Traffic) -> bool:
    if not new.complete or not old.complete:
        return False
    return new.length / new.complete - old.length / old.complete >= LEAST_LENGTH_DIFFERENCE


@dataclass(frozen=True, slots=True)
class _Times:
    """Means of the time per token over answers, and the evidence that the new pods' is above, or below, its limit."""

    new_seconds: float
    old_seconds: float
    above: float
    below: float


def _times(stage: StageEvidence, limits: Limits) -> _Times | None:
    """Compare the times; None while either side has too few answers. An objective needs none of the old pods'."""
    new, old = stage.new, stage.old
    sizes = [new.token_times.count] + ([old.token_times.count] if limits.objective_seconds is None else [])
    if min(sizes) < LEAST_ANSWERS:
        return None
    new_mean, old_mean = new.mean_token_seconds or 0.0, old.mean_token_seconds or 0.0
    if limits.objective_seconds is not None:
        difference, variance = new_mean - limits.objective_seconds, _variance_of_mean(new)
    else:
        difference = new_mean - limits.factor * old_mean
        variance = _variance_of_mean(new) + limits.factor**2 * _variance_of_mean(old)
    size = float(min(sizes))
    above = mean_evidence(difference, variance, size, LEAST_ANSWERS)
    return _Times(new_mean, old_mean, above, mean_evidence(-difference, variance, size, LEAST_ANSWERS))


def _variance_of_mean(traffic: Traffic) -> float:
    """Return at least the variance of the mean: the histogram says how far squares can go."""
    count, mean = traffic.token_times.count, traffic.mean_token_seconds or 0.0
    most = traffic.token_times.most_squares(traffic.token_times_seconds) / count - mean * mean
    return max(most, 0.0) / count


def _why_slower(stage: StageEvidence, limits: Limits) -> str | None:
    times = _times(stage, limits)
    if times is None or not _is_enough(times.above, TOKEN_TIME_ALPHA / MOST_STAGES):
        return None
    if limits.objective_seconds is not None:
        if stage.old.token_times.count < LEAST_ANSWERS or times.old_seconds > limits.objective_seconds:
            return None  # the old pods break it, too
        limit = f"objectives.itl is {1000 * limits.objective_seconds:.0f} ms"
    else:
        limit = f"the limit is {limits.factor:.3g} times"
    return (
        f"its time per token is {1000 * times.new_seconds:.0f} ms, that of the old pods "
        f"{1000 * times.old_seconds:.0f} ms; {limit}"
    )


def _missing_times(stage: StageEvidence, limits: Limits) -> str | None:
    """Return what the comparison of times still needs; None where it has it, or where there is nothing to compare."""
    new, old = stage.new, stage.old
    if not new.token_times.count or (limits.objective_seconds is None and new.complete and not _reports_times(old)):
        return None
    if (times := _times(stage, limits)) is None:
        return f"{LEAST_ANSWERS} answers of two tokens or more on both sides, to compare their times"
    if _is_enough(times.below, MISS_ALPHA):
        return None
    objective = limits.objective_seconds
    if objective is not None and old.token_times.count >= LEAST_ANSWERS and times.old_seconds > objective:
        return None
    return "more answers, to tell its time per token from the limit"


def _reports_times(traffic: Traffic) -> bool:
    """Whether the pods have the histogram; those that answered nothing yet may have it."""
    return bool(traffic.token_times.edges) or not traffic.complete


def _is_enough(log_evidence: float, alpha: float) -> bool:
    return log_evidence >= -math.log(alpha)


def _share(hits: int, size: int) -> str:
    return f"{hits} of {size}"
