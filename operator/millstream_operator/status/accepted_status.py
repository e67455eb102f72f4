"""A status that the API server accepts, from one that it refused: the refused parts are left out, and named. Pure.

One wrong figure in an optional part must not hide why a model is not Ready. Each further refusal leaves out more:

    1  what the answer names, at its second level:  status.plan.memory.weightsBytes  ->  without plan.memory
    2  the whole optional parts that it names                                        ->  without plan
    3  all optional parts
    4  … and the conditions, with short messages
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millstream_operator.diagnosis import conditions
from millstream_operator.diagnosis.conditions import Condition
from millstream_operator.diagnosis.diagnosis import sentence
from millstream_operator.diagnosis.reasons import Reason

Manifest = dict[str, Any]
Path = tuple[str, ...]
LEVELS = (1, 2, 3, 4)
# What tools and autoscalers read, and what no wrong figure of a plan or a pod can reach.
ESSENTIAL = frozenset(
    {
        "observedGeneration",
        "conditions",
        "replicas",
        "readyReplicas",
        "updatedReplicas",
        "availableReplicas",
        "selector",
    }
)
SHORT_CHARACTERS = 500
_FIELD = re.compile(r"\bstatus\.([A-Za-z]+(?:\.[A-Za-z]+)*)")


@dataclass(frozen=True, slots=True)
class Refusal:
    """Parts of a status that were refused, with the values that they had, and the API server's words."""

    parts: Mapping[Path, Any]
    message: str
    is_short: bool = False  # the messages of the conditions are cut

    def is_about(self, status: Mapping[str, Any]) -> bool:
        """Whether the status has the same values again. Another value deserves another try."""
        return all(_value(status, path) == value for path, value in self.parts.items())


def refusal_of(status: Mapping[str, Any], message: str, fields: Iterable[str], level: int) -> Refusal:
    """Return what to leave out of a refused status. `fields`: as the answer names them, `status.memory.predicted`."""
    named = [tuple(found[1].split(".")) for field in [*fields, message] if (found := _FIELD.search(field)) is not None]
    if level <= 2:
        wanted = {_optional(status, path, level) for path in named}
        paths = {path for path in wanted if path is not None}
        if paths:
            return Refusal({path: _value(status, path) for path in paths}, message)
    parts: dict[Path, Any] = {(name,): value for name, value in status.items() if name not in ESSENTIAL}
    if level >= 4:
        parts |= {("conditions",): status.get("conditions")}
    return Refusal(parts, message, is_short=level >= 4)


def accepted(status: Mapping[str, Any], refusal: Refusal, previous: Sequence[Mapping[str, Any]], now: str) -> Manifest:
    """Return the status without the refused parts, and with the condition that names them.

    `previous`: the conditions as they were written last; `now` is RFC 3339, UTC.
    """
    left = dict(status)
    for path in refusal.parts:
        if path != ("conditions",):
            left = _without(left, path)
    names = ", ".join(f"status.{'.'.join(path)}" for path in sorted(refusal.parts))
    found = Condition(
        conditions.STATUS_INCOMPLETE,
        True,
        Reason.STATUS_REFUSED,
        sentence(
            f"The API server refuses {names}, so it is left out of the status; everything else is reported. Apply the "
            f"CRD of this version (kubectl apply -f crds/); if it is applied, report a bug. The API server says: "
            f"{refusal.message[:SHORT_CHARACTERS]}"
        ),
    )
    known = [dict(one) for one in status.get("conditions") or ()]
    if refusal.is_short:
        known = [{**one, "message": str(one.get("message", ""))[:SHORT_CHARACTERS]} for one in known]
    own = conditions.merged([dict(one) for one in previous], [found], status.get("observedGeneration") or 0, now)
    return {**left, "conditions": [*known, *own]}


def _optional(status: Mapping[str, Any], path: Path, level: int) -> Path | None:
    """The part that a field belongs to; None where it is essential or not there."""
    if path[0] in ESSENTIAL or path[0] not in status:
        return None
    part = status[path[0]]
    return path[:2] if level == 1 and len(path) > 2 and isinstance(part, Mapping) and path[1] in part else path[:1]


def _value(status: Mapping[str, Any], path: Path) -> Any:
    found: Any = status
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _without(status: Manifest, path: Path) -> Manifest:
    name, *rest = path
    if not rest or not isinstance(status.get(name), Mapping):
        return {key: value for key, value in status.items() if key != name}
    return {**status, name: _without(dict(status[name]), tuple(rest))}
