"""The affinity of a pod: what the spec says, and the planned GPU ANDed into each of its required terms."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from millstream_operator.api.affinity import Affinity
from millstream_operator.inventory.node_affinity import REQUIRED, and_each
from millstream_operator.inventory.nodes import PRODUCT_LABEL

Rendered = dict[str, Any]


def pod_affinity(given: Affinity | None, product_labels: Collection[str]) -> Rendered:
    """Require nodes with the planned GPUs, by the labels of GPU feature discovery, among those that the spec names."""
    affinity = _rendered(given)
    if not product_labels:
        return affinity
    product = {"key": PRODUCT_LABEL, "operator": "In", "values": sorted(product_labels)}
    nodes = affinity.get("nodeAffinity") or {}
    terms = and_each((nodes.get(REQUIRED) or {}).get("nodeSelectorTerms") or (), product)
    return affinity | {"nodeAffinity": {**nodes, REQUIRED: {"nodeSelectorTerms": terms}}}


def job_affinity(given: Affinity | None, preferred: Rendered) -> Rendered:
    """Of the Job that inspects the model: the nodes that the spec names. It is no replica, so pods do not count."""
    nodes = _rendered(given).get("nodeAffinity")
    return ({"nodeAffinity": nodes} if nodes else {}) | preferred


def _rendered(given: Affinity | None) -> Rendered:
    rendered = given.model_dump(mode="json", by_alias=True, exclude_none=True) if given is not None else {}
    return {kind: terms for kind, terms in rendered.items() if terms}
