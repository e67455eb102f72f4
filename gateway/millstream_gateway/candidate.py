"""A replica that may be picked for a request, and what the request is expected to find there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millstream_gateway.cost import Cost, cost, usual_prefill_rate
from millstream_gateway.picker_beliefs import PickerBeliefs
from millstream_gateway.prefix_chunks import CHUNK_BYTES
from millstream_gateway.rendezvous import rendezvous_score
from millstream_gateway.replica_report import Replica
from millstream_gateway.routed_request import RoutedRequest


@dataclass(frozen=True, slots=True)
class Candidate:
    """`is_guess`: the cached tokens are those of a turn that another picker must have placed."""

    replica: Replica
    cost: Cost
    rendezvous_score: int
    is_guess: bool = False


def candidates_of(
    request: RoutedRequest, replicas: Sequence[Replica], beliefs: PickerBeliefs, now_seconds: float
) -> list[Candidate]:
    """Return all replicas with their costs.

    The turn before this one may have come to another picker. Where no replica is believed to hold it, the first by
    rendezvous hashing is guessed to: that is where each picker sends what it knows nothing of.
    """
    scores = [rendezvous_score(request.conversation, replica.endpoint) for replica in replicas]
    held_chunks = [beliefs.held_chunks(replica.endpoint, request) for replica in replicas]
    tokens = [beliefs.ratio.tokens(chunks * CHUNK_BYTES) for chunks in held_chunks]
    guessed = None
    if replicas and max(held_chunks) < request.previous_bytes // CHUNK_BYTES:
        home = scores.index(max(scores))
        guess_tokens = beliefs.guessed_tokens(request)
        if guess_tokens > tokens[home]:
            guessed, tokens[home] = home, guess_tokens
    usual_rate = usual_prefill_rate(replicas)
    return [
        Candidate(
            replica,
            cost(request, replica, tokens[index], beliefs, now_seconds, usual_rate),
            scores[index],
            is_guess=index == guessed,
        )
        for index, replica in enumerate(replicas)
    ]
