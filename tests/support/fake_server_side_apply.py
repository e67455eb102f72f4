"""Server-side apply in memory: list-maps, atomic lists and maps, and the fields that a manager no longer says. Pure."""

from __future__ import annotations

import copy
from typing import Any

# Lists whose items have an identity, and by what. All other lists are atomic.
LIST_MAP_KEYS: dict[str, tuple[str, ...]] = {
    "containers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "imagePullSecrets": ("name",),
    "ownerReferences": ("uid",),
    "conditions": ("type",),
}
ATOMIC_MAPS = ("selector", "podSelector", "labelSelector", "nodeSelector")
SERVICE_PORT_KEY = ("port", "protocol")


def _identity(field: str, item: Any) -> Any:
    """What identifies an item of the list `field`; None where the list is atomic."""
    if not isinstance(item, dict):
        return None
    keys = LIST_MAP_KEYS.get(field)
    if field == "ports":
        keys = ("containerPort", "protocol") if "containerPort" in item else SERVICE_PORT_KEY
    return tuple(item.get(key) for key in keys) if keys and all(key in item for key in keys) else None


def _by_identity(field: str, items: Any) -> dict[Any, Any] | None:
    if not isinstance(items, list):
        return None
    found = {_identity(field, item): item for item in items}
    return None if None in found else found


def take_away(live: Any, before: Any, now: Any, field: str = "") -> None:
    """Remove from `live` what our last apply owned and this one no longer says."""
    if isinstance(before, dict) and isinstance(live, dict):
        for key in before:
            if not isinstance(now, dict) or key not in now:
                live.pop(key, None)
            elif key in live:
                take_away(live[key], before[key], now[key], key)
    elif isinstance(before, list) and isinstance(live, list):
        old, new, current = (_by_identity(field, items) for items in (before, now, live))
        if old is None or new is None or current is None:
            return  # atomic: the merge replaces it
        for identity, item in old.items():
            if identity in current and identity not in new:
                live.remove(current[identity])
            elif identity in current:
                take_away(current[identity], item, new[identity], field)


def merge(live: Any, given: Any, field: str = "") -> Any:
    """`given` over `live`, as a forced apply."""
    if isinstance(live, dict) and isinstance(given, dict) and field not in ATOMIC_MAPS:
        return {**live, **{key: merge(live.get(key), value, key) for key, value in given.items()}}
    if isinstance(live, list) and isinstance(given, list):
        current, new = _by_identity(field, live), _by_identity(field, given)
        if current is not None and new is not None:
            others = [item for identity, item in current.items() if identity not in new]
            return [*(merge(current.get(identity), item, field) for identity, item in new.items()), *others]
    return copy.deepcopy(given)
