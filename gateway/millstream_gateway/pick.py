"""Pick the replica for a request, and the order in which the others are tried. Pure: no clock, no randomness, no I/O.

Pickers agree without talking to each other: what one does not know it decides by a hash. Among replicas that cost
almost the same, those that are believed to hold the most of the prompt stay, and of them the first by rendezvous
hashing is picked. So a prefix that nobody is believed to hold goes where every picker sends it, a conversation stays on
its replica, and a prefix that all hold is spread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from millstream_gateway.candidate import Candidate, candidates_of
from millstream_gateway.picker_beliefs import PickerBeliefs
from millstream_gateway.prefix_chunks import CHUNK_BYTES
from millstream_gateway.replica_report import Replica
from millstream_gateway.routed_request import RoutedRequest

NEARLY_EQUAL_SHARE = 0.10  # of the cheapest cost
NEARLY_EQUAL_SECONDS = 0.050  # less than what reports are late


class Policy(StrEnum):
    """How a replica is picked; the values are those of `picking.policy`."""

    PREDICTED_TTFT = "PredictedTTFT"
    MOST_FREE_KV = "MostFreeKV"
    LEAST_REQUESTS = "LeastRequests"
    ROUND_ROBIN = "RoundRobin"


class PickReason(StrEnum):
    """Why the first endpoint is the first: the values of a metric's label."""

    PREFIX = "prefix"  # nearly the cheapest, and believed to hold more of the prompt than the others that are
    HASH = "hash"  # several cost nearly the same and hold as much
    COST = "cost"  # no other costs nearly as little
    MOST_FREE_KV = "most-free-kv"
    LEAST_REQUESTS = "least-requests"
    ROUND_ROBIN = "round-robin"
    ONLY_REPLICA = "only-replica"
    NO_REPLICA = "no-replica"  # none serves: there is no endpoint


@dataclass(frozen=True, slots=True)
class Pick:
    """`ranked`: first the picked replica, then its fallbacks. Empty: no replica serves."""

    ranked: tuple[Candidate, ...]
    reason: PickReason

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Return the endpoints in the order in which they are to be tried."""
        return tuple(candidate.replica.endpoint for candidate in self.ranked)


def pick(
    request: RoutedRequest,
    replicas: Sequence[Replica],
    beliefs: PickerBeliefs,
    now_seconds: float,
    policy: Policy = Policy.PREDICTED_TTFT,
) -> Pick:
    """Rank the replicas that serve. The caller records the decision in `beliefs`."""
    serving = [replica for replica in replicas if replica.is_serving]
    candidates = candidates_of(request, serving, beliefs, now_seconds)
    if len(candidates) <= 1:
        return Pick(tuple(candidates), PickReason.ONLY_REPLICA if candidates else PickReason.NO_REPLICA)
    return _RANKINGS[policy](candidates, beliefs)


def _by_predicted_ttft(candidates: list[Candidate], beliefs: PickerBeliefs) -> Pick:
    candidates.sort(key=lambda one: (one.cost.seconds, -one.rendezvous_score))
    cheapest_seconds = candidates[0].cost.seconds
    limit_seconds = cheapest_seconds + max(NEARLY_EQUAL_SHARE * cheapest_seconds, NEARLY_EQUAL_SECONDS)
    near = [one for one in candidates if one.cost.seconds <= limit_seconds]
    half_chunk_tokens = beliefs.ratio.tokens(CHUNK_BYTES / 2)
    most_cached_tokens = max(one.cost.cached_tokens for one in near)
    holders = [one for one in near if one.cost.cached_tokens > most_cached_tokens - half_chunk_tokens]
    first = max(holders, key=lambda one: one.rendezvous_score)
    reason = PickReason.PREFIX if len(holders) < len(near) else PickReason.HASH
    if len(near) == 1:
        reason = PickReason.COST
    return Pick((first, *(one for one in candidates if one is not first)), reason)


def _by_most_free_kv(candidates: list[Candidate], _beliefs: PickerBeliefs) -> Pick:
    candidates.sort(key=lambda one: (-one.cost.free_tokens, -one.rendezvous_score))
    return Pick(tuple(candidates), PickReason.MOST_FREE_KV)


def _by_least_requests(candidates: list[Candidate], beliefs: PickerBeliefs) -> Pick:
    candidates.sort(key=lambda one: (_num_requests(one.replica, beliefs), -one.rendezvous_score))
    return Pick(tuple(candidates), PickReason.LEAST_REQUESTS)


def _num_requests(replica: Replica, beliefs: PickerBeliefs) -> int:
    report = replica.report
    reported = report.queued_requests + report.running_requests if report is not None else 0
    return reported + sum(1 for _ in beliefs.sent_since(replica))


def _round_robin(candidates: list[Candidate], beliefs: PickerBeliefs) -> Pick:
    candidates.sort(key=lambda one: one.replica.endpoint)
    start = beliefs.num_decisions % len(candidates)
    return Pick((*candidates[start:], *candidates[:start]), PickReason.ROUND_ROBIN)


_RANKINGS: dict[Policy, Callable[[list[Candidate], PickerBeliefs], Pick]] = {
    Policy.PREDICTED_TTFT: _by_predicted_ttft,
    Policy.MOST_FREE_KV: _by_most_free_kv,
    Policy.LEAST_REQUESTS: _by_least_requests,
    Policy.ROUND_ROBIN: _round_robin,
}
