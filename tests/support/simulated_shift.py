"""A staged shift over simulated counters: the real stages, evidence and judgement, and pods that answer at random.

Requests go to any ready pod alike. Errors are independent; an answer's time per token is log-normal, with a load of its
own in each look that all pods have in common. The counters go through the text of `/metrics`, with the runtime's own
buckets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.rollout.traffic_shift.evidence import (
    Evidence,
    PodCounters,
    Reading,
    look,
    stage_begins,
    waited,
)
from millstream_operator.rollout.traffic_shift.evidence_record import read_evidence
from millstream_operator.rollout.traffic_shift.staged_shift import READ_SECONDS, compared
from millstream_operator.rollout.traffic_shift.stages import begin, next_shift
from millstream_operator.rollout.traffic_shift.traffic_judgement import Limits
from millstream_operator.workloads.traffic import NO_TRAFFIC, Histogram, Traffic
from millstream_runtime.server.operations.metrics import INTER_TOKEN_BUCKETS

EDGES = (*INTER_TOKEN_BUCKETS, float("inf"))
LOOKS_OF_A_PROCESS = 10  # then another process of the operator goes on from the record
ALIKE = Histogram((100.0, float("inf")), (1, 0))


@dataclass(frozen=True, slots=True)
class Pods:
    """How the pods of one revision answer. `spread`: the standard deviation of the logarithm of the time per token."""

    error_rate: float = 0.01
    token_seconds: float = 0.03
    spread: float = 0.5


@dataclass(frozen=True, slots=True)
class Outcome:
    """`verdict`: passed, worse or held. `new_requests`, `old_requests`: finished when it was reached."""

    verdict: str
    new_requests: int
    old_requests: int
    why: str | None = None


def run_shift(
    owner: LLMDeployment,
    new: Pods,
    old: Pods,
    *,
    requests_per_second: float,
    seed: int,
    replicas: int = 4,
    limits: Limits | None = None,
    each_look: Callable[[Evidence], None] = lambda _: None,
) -> Outcome:
    """Run a shift from its first stage to its verdict. It is held where a stage's timeout passes without evidence."""
    random = np.random.default_rng(seed)
    counters: dict[str, Traffic] = {}
    evidence, shift, judged, looks = Evidence(), begin(replicas), limits or Limits(), 0
    while True:
        new_uids = [f"new-{number}" for number in range(shift.held)]
        old_uids = [f"old-{number}" for number in range(replicas + 1 - shift.held)]
        load = float(random.lognormal(0.0, 0.2))
        for uid in (*new_uids, *old_uids):
            pods = new if uid.startswith("new") else old
            count = int(random.poisson(requests_per_second * READ_SECONDS / (replicas + 1)))
            counters[uid] = counters.get(uid, NO_TRAFFIC).plus(_answers(random, pods, count, load))
        readings = [
            Reading(frozenset(uids), {uid: PodCounters(counters[uid]) for uid in uids}) for uids in (new_uids, old_uids)
        ]
        evidence = look(evidence, *readings)
        evidence = waited(stage_begins(evidence, shift.percent), READ_SECONDS) if shift.is_settled else evidence
        each_look(evidence)
        comparison = compared(owner, shift, evidence, judged, settled=shift.is_settled)
        looks += 1
        if comparison.passed or looks % LOOKS_OF_A_PROCESS == 0:
            evidence = _from_the_record(comparison.evidence)
        outcome = Outcome("", evidence.new.finished, evidence.old.finished, comparison.worse)
        if comparison.worse is not None:
            return replace(outcome, verdict="worse")
        if comparison.insufficient is not None:
            return replace(outcome, verdict="held")
        following = next_shift(shift, shift.held, shift.held, passed=comparison.passed)
        if following is None:
            return replace(outcome, verdict="passed")
        shift = following


def _from_the_record(text: str | None) -> Evidence:
    """Return the evidence as another process reads it."""
    evidence = read_evidence(text)
    assert evidence is not None
    return evidence


def _answers(random: np.random.Generator, pods: Pods, count: int, load: float) -> Traffic:
    """What one pod answers to so many requests."""
    errors = int(random.binomial(count, pods.error_rate))
    times = pods.token_seconds * load * random.lognormal(0.0, pods.spread, count - errors)
    counts = tuple(int(found) for found in np.bincount(np.searchsorted(EDGES, times), minlength=len(EDGES)))
    lengths = Histogram(ALIKE.edges, (count - errors, 0))
    return Traffic(count - errors, 0, errors, Histogram(EDGES, counts), float(times.sum()), lengths, lengths)
