"""What a pod demands of its node: labels that it selects, and taints that it tolerates. Pure.

A GPU that the scheduler would never give to a pod is not free for it, so plans look at nodes through these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# The resource's own taint is tolerated by every GPU pod; Kubernetes' own taints say what `GpuNode.away` says.
TOLERATED_KEYS = frozenset({"nvidia.com/gpu"})
STATE_PREFIX = "node.kubernetes.io/"
REPELLING = frozenset({"NoSchedule", "NoExecute"})


@dataclass(frozen=True, slots=True)
class Taint:
    key: str
    value: str
    effect: str


@dataclass(frozen=True, slots=True)
class Tolerated:
    """A toleration. An empty key tolerates every key, an empty effect every effect; `value` None is `Exists`."""

    key: str
    value: str | None
    effect: str

    def covers(self, taint: Taint) -> bool:
        return (
            self.key in ("", taint.key)
            and (self.value is None or self.value == taint.value)
            and self.effect in ("", taint.effect)
        )


@dataclass(frozen=True, slots=True)
class Demands:
    """Hashable, so that nodes are counted once for all pods that demand the same."""

    node_selector: frozenset[tuple[str, str]] = frozenset()
    tolerations: frozenset[Tolerated] = frozenset()

    def admit(self, labels: Mapping[str, str], taints: Iterable[Taint]) -> bool:
        """Would the scheduler put a pod with these demands there, GPUs left aside?"""
        return all(labels.get(key) == value for key, value in self.node_selector) and all(
            any(tolerated.covers(taint) for tolerated in self.tolerations) for taint in taints
        )


ANYWHERE = Demands()


def read_taints(taints: object) -> tuple[Taint, ...]:
    """Those of a node's taints that keep pods away for good."""
    found = []
    for taint in taints if isinstance(taints, list) else ():
        key, effect = str(taint.get("key", "")), str(taint.get("effect", ""))
        if effect in REPELLING and key not in TOLERATED_KEYS and not key.startswith(STATE_PREFIX):
            found.append(Taint(key, str(taint.get("value") or ""), effect))
    return tuple(found)


def read_tolerations(tolerations: Iterable[Mapping[str, Any]]) -> frozenset[Tolerated]:
    """Tolerations as pods write them."""
    return frozenset(
        Tolerated(
            str(one.get("key") or ""),
            None if one.get("operator") == "Exists" else str(one.get("value") or ""),
            str(one.get("effect") or ""),
        )
        for one in tolerations
    )
