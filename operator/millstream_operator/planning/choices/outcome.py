"""The verdict on one candidate: feasible with its ledger, prediction and cost, or one problem."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from millstream_operator.planning.choices.candidates import Candidate
from millstream_operator.planning.sizing.cost import Cost
from millstream_operator.planning.sizing.memory_ledger import MemoryLedger
from millstream_operator.planning.sizing.roofline import Prediction


class Stage(IntEnum):
    """How far a candidate came. What stopped the one that came farthest is the binding constraint."""

    PRODUCTS, PARALLELISM, QUANTIZATION, SPECULATION, MEMORY, LATENCY, LOAD, INVENTORY, BUDGET, DONE = range(10)

    @property
    def constraint(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Problem:
    """`shortfall` compares problems of one stage: smaller is nearer to feasible."""

    stage: Stage
    sentence: str
    shortfall: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """`problem` None: feasible, and all else is there."""

    candidate: Candidate
    problem: Problem | None = None
    max_num_batched_tokens: int = 0
    max_num_seqs: int = 0
    ledger: MemoryLedger | None = None
    prediction: Prediction | None = None
    replicas: int = 1  # those that the load needs; those of the spec without a load
    cost: Cost | None = None
