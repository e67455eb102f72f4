"""Rules about a change: what a stored object may not become. CEL for the API server, Python for what bypasses it.

A rule stands at a path of the schema and is asked when both the old and the new object have a value there, as the
API server does with a rule that names `oldSelf`. To take the whole value away is another change, and allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from millstream_operator.api.quantity import amount


@dataclass(frozen=True, slots=True)
class Transition:
    """`holds(old, new)`: may the value at `path` become `new`?"""

    path: str
    cel: str
    holds: Callable[[Any, Any], bool]
    message: str


def _kept(field: str, attribute: str, default: str) -> Transition:
    now, before = (f"(has({value}.{field}) ? {value}.{field} : '{default}')" for value in ("self", "oldSelf"))
    return Transition(
        "spec.model.cache",
        f"{now} == {before}",
        lambda old, new: (getattr(old, attribute) or default) == (getattr(new, attribute) or default),
        f"{field} cannot change: a volume keeps it for life. Remove model.cache, and quantization.calibration and "
        "speculation.tuning if they are given; wait for the rollout, then add them anew.",
    )


TRANSITIONS: tuple[Transition, ...] = (
    Transition(
        "spec.model.cache",
        "quantity(self.size).compareTo(quantity(oldSelf.size)) >= 0",
        lambda old, new: amount(new.size) >= amount(old.size),
        "size can grow and never shrink: no storage takes bytes back.",
    ),
    _kept("storageClassName", "storage_class_name", ""),
    _kept("accessMode", "access_mode", "ReadWriteMany"),
)
