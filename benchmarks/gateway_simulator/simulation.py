"""Run a trace over replicas: every arrival is picked by one of the pickers, which know only what replicas reported."""

from __future__ import annotations

import heapq
import random
import statistics
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.gateway_simulator.replica import SimulatedReplica, Speed
from benchmarks.gateway_simulator.trace import Turn
from millstream.bench.measure import percentile
from millstream_gateway.pick import Policy, pick
from millstream_gateway.picker_beliefs import PickerBeliefs
from millstream_gateway.replica_report import Replica

REPORT_SECONDS = 0.100  # between two reports of a replica to one picker
Chooser = Callable[[Turn, float], int]


@dataclass(slots=True)
class Outcome:
    """What a policy reached."""

    ttft_seconds: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    prompt_tokens: int = 0
    seconds: float = 0.0
    busy_seconds: list[float] = field(default_factory=list)  # of each replica
    belief_error_tokens: list[float] = field(default_factory=list)  # believed minus cached, of each request

    @property
    def p95_ttft_seconds(self) -> float:
        """Return the 95th percentile."""
        return percentile(sorted(self.ttft_seconds), 95)

    @property
    def mean_ttft_seconds(self) -> float:
        """Return the mean."""
        return statistics.fmean(self.ttft_seconds)

    @property
    def most_loaded_ratio(self) -> float:
        """Return the busy seconds of the most loaded replica over the mean."""
        return max(self.busy_seconds) / statistics.fmean(self.busy_seconds)


class SimulatedPicker:
    """One picker: its beliefs, and when it hears from the replicas."""

    def __init__(self, replicas: Sequence[SimulatedReplica], policy: Policy, report_offset_seconds: float) -> None:
        self.beliefs = PickerBeliefs()
        self.believed_tokens: dict[str, float] = {}  # by request, when it was decided
        self._replicas = replicas
        self._policy = policy
        self._offset = report_offset_seconds
        self._known: list[Replica] = []
        self._num_answers = [0] * len(replicas)
        self._known_at = -1.0
        self._index = {replica.endpoint: index for index, replica in enumerate(replicas)}

    def choose(self, turn: Turn, now_seconds: float) -> int:
        """Return the replica for a turn."""
        self._read_reports(now_seconds)
        picked = pick(turn.request, self._known, self.beliefs, now_seconds, self._policy)
        first = picked.ranked[0]
        self.believed_tokens[turn.request.request_id] = first.cost.cached_tokens
        endpoint = picked.endpoints[0]
        self.beliefs.decide(turn.request, endpoint, now_seconds, is_guess=first.is_guess)
        return self._index[endpoint]

    def _read_reports(self, now_seconds: float) -> None:
        tick = (now_seconds - self._offset) // REPORT_SECONDS
        reported_at = max(0.0, tick * REPORT_SECONDS + self._offset)
        if reported_at == self._known_at:
            return
        self._known_at = reported_at
        self.beliefs.keep_only(self._index)
        self._known = [self._read(index, reported_at) for index in range(len(self._replicas))]

    def _read(self, index: int, reported_at: float) -> Replica:
        replica, seen = self._replicas[index], self._num_answers[index]
        last = bisect_right(replica.reports, reported_at, key=lambda entry: entry[0]) - 1
        report = replica.reports[max(0, last)][1]
        end = bisect_right(replica.answers, reported_at, lo=seen, key=lambda entry: entry[0])
        self._num_answers[index] = end
        answers = [answer for _, answer in replica.answers[seen:end]]
        self.beliefs.observe_report(replica.endpoint, report, answers)
        return Replica(replica.endpoint, report, reported_at)


def fleet(num_replicas: int, speed: Speed) -> list[SimulatedReplica]:
    """Return idle replicas."""
    return [SimulatedReplica(f"10.0.0.{number + 1}:8000", speed) for number in range(num_replicas)]


def pickers(
    replicas: Sequence[SimulatedReplica], policy: Policy, number: int, seed: int
) -> tuple[Chooser, list[SimulatedPicker]]:
    """Return as many pickers as one function: each turn comes to any of them, as behind a Service."""
    made = [SimulatedPicker(replicas, policy, REPORT_SECONDS * index / number) for index in range(number)]
    rng = random.Random(f"{seed}/pickers")
    return lambda turn, now: rng.choice(made).choose(turn, now), made


def oracle(replicas: Sequence[SimulatedReplica]) -> Chooser:
    """Return the greedy choice by the true caches, queues and speeds, without delay."""

    def choose(turn: Turn, now_seconds: float) -> int:
        seconds = [replica.ttft_seconds(turn, now_seconds) for replica in replicas]
        return seconds.index(min(seconds))

    return choose


def run(turns: Sequence[Turn], replicas: Sequence[SimulatedReplica], choose: Chooser) -> Outcome:
    """Answer all turns. A turn that arrives before its conversation's last answer waits for it."""
    outcome = Outcome()
    ends: list[tuple[float, int]] = []  # heap of phases: when each ends, and whose it is
    arrivals = [(turn.arrives_at_seconds, index, turn) for index, turn in enumerate(turns)]
    heapq.heapify(arrivals)
    answered: dict[int, int] = {}  # turns of each conversation
    early: dict[int, deque[Turn]] = defaultdict(deque)
    while arrivals or ends:
        if arrivals and (not ends or arrivals[0][0] <= ends[0][0]):
            now_seconds, _, turn = heapq.heappop(arrivals)
            if answered.get(turn.conversation, 0) < turn.number:
                early[turn.conversation].append(turn)
                continue
            index = choose(turn, now_seconds)
            replicas[index].submit(turn, now_seconds)
            heapq.heappush(ends, (replicas[index].next_seconds, index))
            continue
        end_seconds, index = heapq.heappop(ends)
        replica = replicas[index]
        if replica.next_seconds != end_seconds:
            continue  # an arrival has shortened that phase
        for job in replica.finish_phase():
            outcome.ttft_seconds.append(job.ttft_seconds)
            outcome.cached_tokens += job.cached_tokens
            outcome.prompt_tokens += job.turn.prompt_tokens
            outcome.seconds = end_seconds
            answered[job.turn.conversation] = job.turn.number + 1
            if early[job.turn.conversation]:
                heapq.heappush(arrivals, (end_seconds, ~job.turn.conversation, early[job.turn.conversation].popleft()))
        if replica.num_requests:
            heapq.heappush(ends, (replica.next_seconds, index))
    outcome.busy_seconds = [replica.busy_seconds for replica in replicas]
    return outcome
