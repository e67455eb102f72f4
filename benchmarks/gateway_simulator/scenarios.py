"""What is simulated: fleets under a Poisson load at a share of their capacity, with each policy and the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from benchmarks.gateway_simulator.replica import SimulatedReplica, Speed
from benchmarks.gateway_simulator.simulation import Outcome, fleet, oracle, pickers, run
from benchmarks.gateway_simulator.trace import Shape, Turn, trace
from millstream_gateway.pick import Policy
from millstream_gateway.replica_report import id_hash

LOAD = 0.70  # of the requests per second that replicas answer which remember no conversation
ORACLE = "oracle"
# A small model on a CPU, whose cache holds nine whole conversations: a third of 24 fit, all do not.
SMALL = Speed(0.0012, 1 / 5000, 0.0002, step_tokens=512, max_num_seqs=16, cache_tokens=16_384)
GPU = Speed()


@dataclass(frozen=True, slots=True)
class Scenario:
    """A fleet and its conversations."""

    name: str
    num_replicas: int
    speed: Speed
    conversations_per_replica: int
    shape: Shape = Shape()  # noqa: RUF009 - frozen

    def turns(self, seed: int) -> list[Turn]:
        """Return the trace of a seed."""
        rate = LOAD * self.num_replicas * requests_per_second(self.speed, self.shape)
        return trace(self.num_replicas * self.conversations_per_replica, rate, self.shape, seed)


SCENARIOS = (
    Scenario("conversations", 3, SMALL, 8),
    Scenario("conversations, ample cache", 3, replace(SMALL, cache_tokens=1_000_000), 8),
    Scenario("one hot prefix", 3, SMALL, 60, Shape(turns=2, shared_tokens=800)),
    Scenario("no shared prefix", 3, SMALL, 60, Shape(turns=1, first_tokens=900)),
    *(Scenario(f"{number} replicas", number, GPU, 16) for number in (8, 16, 32, 64)),
)


@cache
def requests_per_second(speed: Speed, shape: Shape) -> float:
    """Return what one replica answers that always has enough to do, and caches only what all conversations share."""
    turns = trace(40, 1e6, shape, seed=0)
    replica = SimulatedReplica("capacity", speed)
    at_once = [replace(turn, conversation=index, number=0, arrives_at_seconds=0.0) for index, turn in enumerate(turns)]
    outcome = run(at_once, [replica], lambda turn, now: 0)
    return len(turns) / outcome.seconds


def simulate(scenario: Scenario, turns: Sequence[Turn], policy: Policy | str, num_pickers: int, seed: int) -> Outcome:
    """Run a scenario's trace with a policy, or with the oracle."""
    replicas = fleet(scenario.num_replicas, scenario.speed)
    if policy == ORACLE:
        return run(turns, replicas, oracle(replicas))
    choose, made = pickers(replicas, Policy(policy), num_pickers, seed)
    outcome = run(turns, replicas, choose)
    believed = {request: tokens for picker in made for request, tokens in picker.believed_tokens.items()}
    cached = {answer.id: answer.cached_tokens for replica in replicas for _, answer in replica.answers}
    outcome.belief_error_tokens = [tokens - cached[id_hash(request)] for request, tokens in believed.items()]
    return outcome
