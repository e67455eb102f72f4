"""The stages in which traffic shifts to a revision that answers differently. Pure.

    one pod -> 25 % -> 50 % -> 100 % of the replicas -> the last old pod goes

A stage is a number of new pods that the workload holds at (`Workload.render`, `held`): with N replicas and n new pods
there are N + 1 - n old ones, so N + 1 in all. From one stage to the next they are replaced one by one, and only while
every new pod is ready: an old pod goes for each one that comes, so N are ready at any moment if N were before. What is
held now is in the live object alone, and what was compared on the record of the revision (`evidence_record.py`), so
another process of the operator goes on from there.

A request goes to any pod that is ready, so a pod's share of the traffic is its share of the pods.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from millstream_operator.rendering.revision import Revision

PERCENTS = (25, 50, 100)
LEAST_REPLICAS = 2


@dataclass(frozen=True, slots=True)
class Shift:
    """Where the shift is. `held`: new replicas that the workload holds at, the one or ones that come up included."""

    held: int
    replicas: int

    @property
    def number(self) -> int:
        """Of the stage, from 1."""
        return stages(self.replicas).index(self.target) + 1

    @property
    def target(self) -> int:
        """The number of new replicas at which the stage is compared."""
        return next(count for count in stages(self.replicas) if count >= self.held)

    @property
    def percent(self) -> int:
        """The share that names the stage, whatever number of replicas an autoscaler asks for; 0: one pod, and less."""
        counts = ((percent, math.ceil(self.replicas * percent / 100)) for percent in PERCENTS)
        return max((percent for percent, count in counts if count == self.target), default=0)

    @property
    def is_settled(self) -> bool:
        """Whether no more replicas are replaced before the stage is compared."""
        return self.held == self.target

    def __str__(self) -> str:
        return f"stage {self.number} of {len(stages(self.replicas))} ({self.target} of {self.replicas} replicas)"


def stages(replicas: int) -> Sequence[int]:
    """Return the numbers of new replicas, ascending; the last is all of them. `replicas`: at least one."""
    return sorted({1, *(math.ceil(replicas * percent / 100) for percent in PERCENTS)})


def begin(replicas: int) -> Shift:
    return Shift(1, replicas)


def scaled(shift: Shift, replicas: int) -> Shift:
    """Return the shift of another number of replicas: never a larger share of new ones, and at least one."""
    if replicas == shift.replicas:
        return shift
    return Shift(max(1, shift.held * replicas // shift.replicas), replicas)


def next_shift(now: Shift, new: int, new_ready: int, *, passed: bool) -> Shift | None:
    """Return what to hold at; None: the last stage has passed, and the last old replica goes.

    `now`: what the live object holds at, `scaled` to what is wanted now; `new`, `new_ready`: new replicas that exist
    and are ready. `passed`: this stage was compared, with all of them ready.
    """
    if new_ready < max(now.held, new):
        return now
    if now.is_settled and not passed:
        return now
    return Shift(now.held + 1, now.replicas) if now.held < now.replicas else None


def answers_differently(one: Revision, other: Revision) -> bool:
    """Whether two revisions may answer the same question differently: another model, or other formats of numbers."""
    return _model(one) != _model(other)


def formats_of(revision: Revision) -> tuple[object, ...]:
    """Return the formats of its weights and of its keys and values."""
    return revision.plan.get("quantization"), revision.plan.get("kvCache")


def _model(revision: Revision) -> tuple[object, ...]:
    folder = (revision.boot or {}).get("model")
    return folder, revision.resolved_revision, *formats_of(revision)
