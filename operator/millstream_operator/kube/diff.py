"""Compare a live object with its manifest, so that nothing is written where they agree.

Server-side apply alone would be correct, but a no-op apply still costs the API server, and can bump resourceVersions.
Two checks are made:

1. Was the object last applied from the same manifest? A digest in an annotation says so. Nothing else shows that it
   holds a field that we no longer want, and only an apply removes that field.
2. Does it still hold every value of the manifest? Someone may have edited it since.

The server may normalise a value. What it made of our last apply is remembered and counts as equal: a normalised value
must not cause a write on every turn.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

APPLIED_ANNOTATION = "millstream.dev/applied"
DIGEST_LENGTH = 16
# Maps that server-side apply replaces as a whole: one key more in a selector, and it selects nothing.
ATOMIC_MAPS = frozenset({"selector", "podSelector", "labelSelector", "nodeSelector"})
EMPTY: tuple[Any, ...] = (None, "", {}, [])


def with_digest(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest with its own digest. Nested values are shared, so neither may be changed afterwards."""
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:DIGEST_LENGTH]
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), APPLIED_ANNOTATION: digest}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def projected(live: Any, wanted: Any) -> Any:
    """Return the part of `live` that `wanted` also has. Lists count as a whole: their items have no other identity."""
    if isinstance(wanted, dict):
        if not isinstance(live, dict):
            return live
        return {
            key: live.get(key) if key in ATOMIC_MAPS else projected(live.get(key), value)
            for key, value in wanted.items()
        }
    if isinstance(wanted, list) and isinstance(live, list) and len(live) == len(wanted):
        return [projected(one, other) for one, other in zip(live, wanted, strict=True)]
    return live


def matches(live: Any, wanted: Any) -> bool:
    """Return whether the live object holds every value of the manifest. Absent and empty count as the same."""
    if isinstance(wanted, dict) and isinstance(live, dict):
        return all(
            _equal(live.get(key), value) if key in ATOMIC_MAPS else matches(live.get(key), value)
            for key, value in wanted.items()
        )
    if isinstance(wanted, list) and isinstance(live, list):
        return len(live) == len(wanted) and all(map(matches, live, wanted))
    return _same(live, wanted)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return _same(one, other)


def _same(one: Any, other: Any) -> bool:
    return bool(one == other) or (one in EMPTY and other in EMPTY)


class LastApplied:
    """The state of each object after our last apply, where the server did not store literally what we sent."""

    def __init__(self) -> None:
        self._made: dict[str, str] = {}

    def needs_apply(self, live: dict[str, Any] | None, wanted: dict[str, Any]) -> bool:
        """Return whether `wanted`, a manifest with its digest, must be applied."""
        if live is None:
            return True
        if matches(live, wanted):
            return False
        return self._made.get(live["metadata"]["uid"]) != _digest(live, wanted)

    def applied(self, answer: dict[str, Any], wanted: dict[str, Any]) -> None:
        """Remember the answer to an apply."""
        uid = answer["metadata"]["uid"]
        if matches(answer, wanted):
            self._made.pop(uid, None)
        else:
            self._made[uid] = _digest(answer, wanted)

    def forget(self, uid: str) -> None:
        self._made.pop(uid, None)


def _digest(live: dict[str, Any], wanted: dict[str, Any]) -> str:
    text = json.dumps([projected(live, wanted), wanted], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
