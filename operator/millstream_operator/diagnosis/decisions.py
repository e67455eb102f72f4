"""`status.decisions`: a bounded journal of what the operator decided by itself, newest first. Pure.

Conditions say what is; the journal says what was done and why: a plan adopted, a rollout that was rolled back, a
replica drained because no GPU was spare. Decisions are made again at every turn of the level-triggered loop, so one
that says the same as the newest of its type is not written again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    PLAN_ADOPTED = "PlanAdopted"
    AUTOSCALER_CHOSEN = "AutoscalerChosen"


@dataclass(frozen=True, slots=True)
class Decision:
    """`type` is a stable CamelCase word of docs/reasons.md; `message` is one sentence with the why."""

    type: str
    message: str


def journal(previous: Sequence[dict[str, Any]], made: Iterable[Decision], now: str) -> list[dict[str, Any]]:
    """`previous` with what was decided now before it, `LIMIT` entries at most. `now` is RFC 3339, UTC."""
    entries = list(previous)
    for decision in made:
        message = decision.message[:MESSAGE_LIMIT_CHARACTERS]
        newest = next((entry for entry in entries if entry["type"] == decision.type), None)
        if newest is None or newest["message"] != message:
            entries.insert(0, {"time": now, "type": decision.type, "message": message})
    return entries[:LIMIT]
