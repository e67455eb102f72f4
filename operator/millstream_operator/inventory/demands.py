"""What a pod demands of its node: labels that it selects or requires, and taints that it tolerates. Pure.

A GPU that the scheduler would never give to a pod is not free for it, so plans look at nodes through these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from millstream_operator.inventory.left_out import Why
from millstream_operator.inventory.node_affinity import Terms, admit, in_words

# The resource's own taint is tolerated by every GPU pod; Kubernetes' own taints say what `GpuNode.away` says.
TOLERATED_KEYS = frozenset({"nvidia.com/gpu"})
STATE_PREFIX = "node.kubernetes.io/"
MAX_WORDS = 400  # of one reason: a verdict names several
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
    terms: Terms = frozenset()  # required node affinity

    def why_not(self, labels: Mapping[str, str], taints: Iterable[Taint]) -> Why | None:
        """Return what keeps the scheduler from putting such a pod there; None: nothing does."""
        wanted = [(key, value) for key, value in sorted(self.node_selector) if labels.get(key) != value]
        repelling = [taint for taint in taints if not any(tolerated.covers(taint) for tolerated in self.tolerations)]
        unmet = "" if admit(self.terms, labels) else in_words(self.terms)
        return _why(wanted, unmet, repelling) if wanted or unmet or repelling else None


ANYWHERE = Demands()


def _why(wanted: list[tuple[str, str]], unmet: str, repelling: list[Taint]) -> Why:
    """All that keeps pods away in one reason, and all that must be changed in one instruction."""
    problems, edits, labels = [], [], [f"{key}={value}" for key, value in wanted]
    if wanted:
        noun = "label" if len(wanted) == 1 else "labels"
        problems.append(f"no {noun} {' and '.join(labels)}, which the pods' nodeSelector asks for")
        edits.append(f"change podTemplate.spec.nodeSelector, or run kubectl label node NODE {' '.join(labels)}")
    if unmet:
        problems.append(f"the pods' required node affinity is not met: {unmet}"[:MAX_WORDS])
        edits.append("change podTemplate.spec.affinity.nodeAffinity or the node's labels")
    if repelling:
        noun = "taint" if len(repelling) == 1 else "taints"
        problems.append(f"the pods do not tolerate the {noun} {' and '.join(map(str, repelling))}")
        edits.append(f"add {' and '.join(taint.toleration for taint in repelling)} {TO_TOLERATIONS}")
    tolerations = tuple((taint.key, taint.value, taint.effect) for taint in repelling)
    keys = tuple(key for key, _ in wanted)
    return Why("; ".join(problems), ("; also ".join(edits),), *((tolerations, keys) if not unmet else ()))


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
