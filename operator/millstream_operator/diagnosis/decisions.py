"""`status.decisions`: a bounded journal of what the operator decided without the user, newest first. Pure.

Conditions say what is; the journal says what was done and why: a plan adopted, a rollout that was rolled back, a
replica drained because no GPU was spare. Decisions are made again in every turn of the level-triggered loop: one with
the same message as the newest of its type is not written again, and `rollout/journal_marks.py` leaves out those of an
attempt that the journal has already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

LIMIT = 20
MESSAGE_LIMIT_CHARACTERS = 1000


class DecisionType(StrEnum):
    """Stable: machines and runbooks depend on them."""

    REPLACING_IN_PLACE = "ReplacingInPlace"
    ROLLOUT_STOPPED = "RolloutStopped"
    ROLLED_BACK = "RolledBack"
    ROLLOUT_RETRIED = "RolloutRetried"
    PUT_OFF = "PutOff"
    PLAN_ADOPTED = "PlanAdopted"
    TRAFFIC_SHIFT_STARTED = "TrafficShiftStarted"
    TRAFFIC_SHIFTED = "TrafficShifted"
    AUTOSCALER_CHOSEN = "AutoscalerChosen"
    QUANTIZATION_STARTED = "QuantizationStarted"
    MODEL_QUANTIZED = "ModelQuantized"
    QUALITY_GATE_STARTED = "QualityGateStarted"
    QUALITY_GATE_PASSED = "QualityGatePassed"
    QUALITY_GATE_FAILED = "QualityGateFailed"
    DRAFT_TUNING_STARTED = "DraftTuningStarted"
    TUNED_DRAFT_PROMOTED = "TunedDraftPromoted"
    TUNED_DRAFT_REFUSED = "TunedDraftRefused"
    SPECULATION_CHANGED = "SpeculationChanged"
    DRAFTER_FAILED = "DrafterFailed"


@dataclass(frozen=True, slots=True)
class Decision:
    """`type` is a stable CamelCase word of docs/reasons.md; `detail` says what was decided and why.

    `attempt` names the rollout that it is about (`attempt_of`); empty: it is about no rollout. The message begins with
    it, so that an entry of the journal can be recognised whatever its details are.
    """

    type: str
    detail: str
    attempt: str = ""
    step: str = ""  # of several of this type in one attempt; the attempt's words name it, too

    @property
    def mark(self) -> str:
        """What the record of the attempt keeps of it once the journal has it."""
        return f"{self.type}/{self.step}" if self.step else self.type

    @property
    def message(self) -> str:
        """What a person reads."""
        return f"{self.attempt} {self.detail}" if self.attempt else self.detail


def attempt_of(revision_name: str, number: int) -> str:
    """One attempt to roll a revision out. The number tells two attempts at the same revision apart."""
    return f"Revision {revision_name} (no. {number})"


def is_entry_of(entry: Mapping[str, Any], decision: Decision) -> bool:
    """Whether an entry of the journal is about the attempt of this decision, and of its type."""
    about = bool(decision.attempt) and str(entry["message"]).startswith(f"{decision.attempt} ")
    return about and bool(entry["type"] == decision.type)


def journal(previous: Sequence[dict[str, Any]], made: Iterable[Decision], now: str) -> list[dict[str, Any]]:
    """Return `made` and `previous`, newest first, `LIMIT` entries at most. `now` is RFC 3339, UTC."""
    entries = list(previous)
    for decision in made:
        message = decision.message[:MESSAGE_LIMIT_CHARACTERS]
        newest = next((entry for entry in entries if entry["type"] == decision.type), None)
        if newest is None or newest["message"] != message:
            entries.insert(0, {"time": now, "type": decision.type, "message": message})
    return entries[:LIMIT]
