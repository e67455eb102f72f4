"""The evidence of a staged shift: what new and old pods answered since it began, and what follows from it. Pure.

    counters of each pod, at every look -> Evidence -> `traffic_judgement.judge`

A look takes what each pod answered since the look before: a pod that is new here begins with its first reading, one
whose process began anew counts from zero, one that cannot be read keeps its last reading. Both sides are compared
within a look, so load or trouble that comes to all pods alike is no evidence against the new ones. The unit is a
request: tokens of one step are correlated. Requests that fail because an engine or a container ends are one event,
however many they are, so such a look counts one error for that pod, and a restart.

It is stored on the revision's record after each look (`evidence_record.py`), so another process of the operator goes on
from there. No clock counts in it but the seconds that a stage has waited, by a monotonic one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from millstream_operator.rollout.traffic_shift.sequential_tests import odds_evidence, rate_evidence, share_evidence
from millstream_operator.workloads.traffic import NO_TRAFFIC, Traffic

# New pods fail this many times as often, by odds: the alternatives that are averaged.
WORSE_ODDS = (1.5, 2.0, 3.0, 6.0, 20.0)
# What a stage has to rule out before it passes: errors in 3 % of the requests, at three times the old pods' odds.
BAD_RATE, BAD_ODDS = 0.03, 3.0
GOOD_RATES, GOOD_ODDS = (0.0005, 0.003, 0.01, 0.02), (1.0, 1.7)
MAX_REQUESTS_PER_LOOK = 1_000_000  # of one pod: more is no counter of a server
Logs = tuple[float, ...]
NO_LOGS: Logs = (0.0,) * len(WORSE_ODDS)


@dataclass(frozen=True, slots=True)
class PodCounters:
    """What one pod said last. `traffic` None: it was not read yet. `restarts`: of its containers."""

    traffic: Traffic | None
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Reading:
    """One side's pods in one look. `living`: all that exist, by uid; `pods`: those that serve."""

    living: Collection[str] = ()
    pods: Mapping[str, PodCounters] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StageEvidence:
    """Since the stage began. `percent`: of the replicas (`Shift.percent`), which an autoscaler does not change.

    `few_errors`, `like_the_old`: evidence that errors are rarer than BAD_RATE, and than BAD_ODDS times the old pods'.
    """

    percent: int
    new: Traffic = NO_TRAFFIC
    old: Traffic = NO_TRAFFIC
    few_errors: Logs = (0.0,) * len(GOOD_RATES)
    like_the_old: Logs = (0.0,) * len(GOOD_ODDS)
    waited_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Evidence:
    """Since the shift began. `errors`, `at_limit`, `restarts`: the logarithms of the evidence that the new pods have
    more of them, for each of WORSE_ODDS. `passed`: the largest percent of a stage that ended; `unproven`: those that
    ended without the evidence that they need."""

    pods: Mapping[str, PodCounters] = field(default_factory=dict)
    new: Traffic = NO_TRAFFIC
    old: Traffic = NO_TRAFFIC
    new_restarts: int = 0
    old_restarts: int = 0
    errors: Logs = NO_LOGS
    at_limit: Logs = NO_LOGS
    restarts: Logs = NO_LOGS
    stage: StageEvidence | None = None
    passed: int = -1
    unproven: tuple[int, ...] = ()


def look(before: Evidence, new: Reading, old: Reading) -> Evidence:
    """Return the evidence with what the pods answered since the last look."""
    new_part, new_restarts = _since(before.pods, new.pods)
    old_part, old_restarts = _since(before.pods, old.pods)
    seen = {uid: one for uid, one in before.pods.items() if uid in new.living or uid in old.living}
    for uid, one in (*new.pods.items(), *old.pods.items()):
        last = seen.get(uid)
        seen[uid] = replace(one, traffic=last.traffic) if one.traffic is None and last is not None else one
    stage = _stage_after(before.stage, new_part, old_part) if before.stage is not None else None
    return replace(
        before,
        pods=seen,
        new=before.new.plus(new_part),
        old=before.old.plus(old_part),
        new_restarts=before.new_restarts + new_restarts,
        old_restarts=before.old_restarts + old_restarts,
        errors=_more(before.errors, new_part.error, new_part.finished, old_part.error, old_part.finished),
        at_limit=_more(before.at_limit, new_part.length, new_part.complete, old_part.length, old_part.complete),
        restarts=_more_restarts(before.restarts, new_restarts, old_restarts, len(new.pods), len(old.pods)),
        stage=stage,
    )


def stage_begins(before: Evidence, percent: int) -> Evidence:
    """Return the evidence at the beginning of a stage; unchanged where that stage, or a later one, has begun."""
    if percent <= before.passed or (before.stage is not None and before.stage.percent >= percent):
        return before
    return replace(before, stage=StageEvidence(percent))


def stage_ends(before: Evidence, percent: int, *, proven: bool) -> Evidence:
    """Return the evidence after a stage passed. `proven`: with the evidence that it needs."""
    if percent <= before.passed:
        return before
    unproven = before.unproven if proven else (*before.unproven, percent)
    return replace(before, passed=percent, unproven=unproven)


def waited(before: Evidence, seconds: float) -> Evidence:
    """Return the evidence of a stage that has waited so much longer."""
    stage = before.stage
    if stage is None:
        return before
    return replace(before, stage=replace(stage, waited_seconds=stage.waited_seconds + max(0.0, seconds)))


def _since(seen: Mapping[str, PodCounters], now: Mapping[str, PodCounters]) -> tuple[Traffic, int]:
    """Return what one side's pods answered since they were seen last, and how often something in them began anew."""
    traffic, restarts = NO_TRAFFIC, 0
    for uid, one in now.items():
        if (last := seen.get(uid)) is None:
            continue
        part = NO_TRAFFIC
        if one.traffic is not None and last.traffic is not None:
            part = one.traffic.since(last.traffic)
        if part.finished > MAX_REQUESTS_PER_LOOK:
            part = NO_TRAFFIC
        anew = max(0, one.restarts - last.restarts) + part.engine_restarts
        if anew:
            part = replace(part, error=min(part.error, 1))
        traffic, restarts = traffic.plus(part), restarts + anew
    return traffic, restarts


def _stage_after(stage: StageEvidence, new: Traffic, old: Traffic) -> StageEvidence:
    hits, size = new.error, new.finished
    few = [
        log + rate_evidence(hits, size, rate, BAD_RATE) for log, rate in zip(stage.few_errors, GOOD_RATES, strict=True)
    ]
    like = [
        log + odds_evidence(hits, size, old.error, old.finished, odds, BAD_ODDS)
        for log, odds in zip(stage.like_the_old, GOOD_ODDS, strict=True)
    ]
    sums = stage.new.plus(new), stage.old.plus(old)
    return replace(stage, new=sums[0], old=sums[1], few_errors=tuple(few), like_the_old=tuple(like))


def _more(logs: Logs, hits: int, size: int, other_hits: int, other_size: int) -> Logs:
    return tuple(
        log + odds_evidence(hits, size, other_hits, other_size, odds)
        for log, odds in zip(logs, WORSE_ODDS, strict=True)
    )


def _more_restarts(logs: Logs, new: int, old: int, new_pods: int, old_pods: int) -> Logs:
    """Both sides' pods had the same time, so the number of pods is the exposure."""
    if not new_pods or not old_pods:
        return logs
    share = new_pods / (new_pods + old_pods)
    return tuple(log + share_evidence(new, old, share, odds) for log, odds in zip(logs, WORSE_ODDS, strict=True))
