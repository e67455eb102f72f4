"""What a pod demands of its node: labels that it selects, and taints that it tolerates. Pure.

A GPU that the scheduler would never give to a pod is not free for it, so plans look at nodes through these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from millstream_operator.inventory.left_out import Why

# The resource's own taint is tolerated by every GPU pod; Kubernetes' own taints say what `GpuNode.away` says.
TOLERATED_KEYS = frozenset({"nvidia.com/gpu"})
STATE_PREFIX = "node.kubernetes.io/"
TO_TOLERATIONS = "to podTemplate.spec.tolerations"
REPELLING = frozenset({"NoSchedule", "NoExecute"})


@dataclass(frozen=True, slots=True)
class Taint:
    key: str
    value: str
    effect: str

    def __str__(self) -> str:
        return f"{self.key}{f'={self.value}' if self.value else ''}:{self.effect}"

    @property
    def toleration(self) -> str:
        """The toleration of exactly this taint, as YAML."""
        operator = f"operator: Equal, value: {self.value}" if self.value else "operator: Exists"
        return f"{{key: {self.key}, {operator}, effect: {self.effect}}}"


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
        return self.why_not(labels, taints) is None

    def why_not(self, labels: Mapping[str, str], taints: Iterable[Taint]) -> Why | None:
        """Return what keeps the scheduler from putting such a pod there; None: nothing does."""
        for key, value in sorted(self.node_selector):
            if labels.get(key) != value:
                return Why(
                    f"no label {key}={value}, which the pods' nodeSelector asks for",
                    ("change podTemplate.spec.nodeSelector or the node's labels",),
                )
        for taint in taints:
            if not any(tolerated.covers(taint) for tolerated in self.tolerations):
                return Why(f"the pods do not tolerate the taint {taint}", (f"add {taint.toleration} {TO_TOLERATIONS}",))
        return None


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
