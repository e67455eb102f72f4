"""What pods request besides GPUs, compared. Pure.

The operator counts GPUs and no other resource of a node: a pod that requests more memory than the one it replaces may
find no room where that one ran.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import Any

from millstream_operator.api.quantity import amount
from millstream_operator.inventory.nodes import GPU_RESOURCE

Manifest = dict[str, Any]


def growing_requests(template: Manifest, pods: Iterable[Manifest]) -> list[str]:
    """Names of the resources, GPUs aside, of which the template requests more than one of the pods does."""
    wanted, held = _requests(template), [_requests(pod) for pod in pods]
    return sorted(name for name, some in wanted.items() if any(some > pod.get(name, Fraction(0)) for pod in held))


def _requests(pod: Manifest) -> dict[str, Fraction]:
    """Of the containers together, or of the init container with the most. A limit without a request is the request."""
    spec = pod.get("spec") or {}
    found: dict[str, Fraction] = {}
    for container in spec.get("containers") or ():
        for name, some in _of(container).items():
            found[name] = found.get(name, Fraction(0)) + some
    for container in spec.get("initContainers") or ():
        for name, some in _of(container).items():
            found[name] = max(found.get(name, Fraction(0)), some)
    return found


def _of(container: Manifest) -> dict[str, Fraction]:
    resources = container.get("resources") or {}
    merged = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: amount(str(text)) for name, text in merged.items() if name != GPU_RESOURCE}
