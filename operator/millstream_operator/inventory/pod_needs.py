"""What a rendered pod needs of a node: GPUs, labels, tolerated taints. Pure.

Read from the pod template that is pinned, not from the spec: a revision keeps what it was rendered with, and what
decides about a rollout is what kube-scheduler will read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from millstream_operator.inventory.demands import Taint, Tolerated, read_tolerations
from millstream_operator.inventory.node_affinity import Terms, admit, read_terms
from millstream_operator.inventory.nodes import PRODUCT_LABEL
from millstream_operator.inventory.pods import gpus_of

GIVEN_TO_ALL = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
Pod = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PodNeeds:
    """`terms`: required node affinity; one of them must hold, and of that one all expressions."""

    gpus: int
    node_selector: frozenset[tuple[str, str]] = frozenset()
    tolerations: frozenset[Tolerated] = frozenset()
    terms: Terms = frozenset()

    @property
    def products(self) -> tuple[str, ...]:
        """The GPUs that the affinity names, by the label of GPU feature discovery; empty: any."""
        named = {
            value
            for term in self.terms
            for key, operator, values in term
            if key == PRODUCT_LABEL and operator == "In"
            for value in values
        }
        return tuple(sorted(named))

    def __str__(self) -> str:
        """`2 × NVIDIA-L4 on one node`."""
        product = " or ".join(self.products) or "nvidia.com/gpu"
        return f"{self.gpus} × {product}{' on one node' if self.gpus > 1 else ''}"

    def selects(self, labels: Mapping[str, str]) -> bool:
        """Whether nodeSelector and required node affinity admit a node with these labels."""
        return all(labels.get(key) == value for key, value in self.node_selector) and admit(self.terms, labels)

    def tolerates(self, taints: Iterable[Taint]) -> bool:
        return all(any(one.covers(taint) for one in self.tolerations) for taint in taints)

    def at_most(self, other: PodNeeds) -> bool:
        """Whether every node that has room for `other` has room for this."""
        return (
            self.gpus <= other.gpus
            and self.node_selector <= other.node_selector
            and self.tolerations >= other.tolerations
            and (not self.terms or self.terms == other.terms)
        )


def read_needs(pod: Pod) -> PodNeeds:
    """Of a pod, or of a pod template."""
    spec = pod.get("spec") or {}
    return PodNeeds(
        gpus_of(pod),
        frozenset((str(key), str(value)) for key, value in (spec.get("nodeSelector") or {}).items()),
        frozenset(one for one in read_tolerations(spec.get("tolerations") or ()) if not _is_given_to_all(one)),
        read_terms(spec.get("affinity") or {}),
    )


def _is_given_to_all(toleration: Tolerated) -> bool:
    """Whether the API server adds it to every pod (DefaultTolerationSeconds): a template lacks it, its pod has it."""
    return toleration.effect == "NoExecute" and toleration.key in GIVEN_TO_ALL
