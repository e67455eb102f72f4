"""Rules for what is new: a stored object that breaks one keeps serving, scaling and being edited elsewhere.

Rules of `rules.py` hold for every object. Those here came later than objects that break them: the API server asks them
with `optionalOldSelf`, so that an update passes where the old object broke the rule in the same way. `millstream
validate` asks them of a file, as of a new object; the operator asks none of them of what is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.rules import Violation, values_at
from millstream_operator.api.spec import LLMDeploymentSpec, ServiceType

# What the operator or the node sets, and what makes the loader or the interpreter load other code.
RESERVED_ENV = (
    "HOME",
    "PATH",
    "LD_PRELOAD",
    "LD_AUDIT",
    "PYTHONHOME",
    "PYTHONPATH",
    "PYTHONSTARTUP",
    "PYTHONINSPECT",
    "PYTHONUSERBASE",
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
)


@dataclass(frozen=True, slots=True)
class Ratchet:
    """`holds` is asked of a new value at `path`, `kept(old, new)` where a stored value breaks it already."""

    path: str
    cel: str
    holds: Callable[[Any], bool]
    kept: Callable[[Any, Any], bool]
    message: str


def new_violations(deployment: LLMDeployment) -> Iterator[Violation]:
    """The ratchets that `deployment` breaks as a new object."""
    for ratchet in RATCHETS:
        for path, value in values_at(deployment, ratchet.path):
            if not ratchet.holds(value):
                yield Violation(path, ratchet.message)


def is_exposed(spec: LLMDeploymentSpec) -> bool:
    """Whether the Service can be reached from outside the cluster, and the spec does not say who may ask."""
    kind = spec.service.type if spec.service is not None else None
    decided = spec.auth is not None and (spec.auth.mode, spec.auth.api_keys_secret_ref) != (None, None)
    return kind not in (None, ServiceType.CLUSTER_IP) and not decided


def _same_type(old: LLMDeploymentSpec, new: LLMDeploymentSpec) -> bool:
    return (old.service and old.service.type) == (new.service and new.service.type)


def _exposed(spec: str) -> str:
    """`is_exposed` in CEL."""
    return (
        f"(has({spec}.service) && has({spec}.service.type) && {spec}.service.type != 'ClusterIP' && "
        f"!(has({spec}.auth) && (has({spec}.auth.mode) || has({spec}.auth.apiKeysSecretRef))))"
    )


_RESERVED = " || ".join(f"self.name == '{name}'" for name in RESERVED_ENV)
RATCHETS: tuple[Ratchet, ...] = (
    Ratchet(
        "spec",
        f"!{_exposed('self')} || (oldSelf.hasValue() && {_exposed('oldSelf.value()')} && "
        "oldSelf.value().service.type == self.service.type)",
        lambda spec: not is_exposed(spec),
        lambda old, new: is_exposed(old) and _same_type(old, new),
        "service.type NodePort or LoadBalancer lets everyone outside the cluster use the model: give "
        "auth.apiKeysSecretRef, or say auth.mode: Disabled.",
    ),
    Ratchet(
        "spec.podTemplate.spec.containers[].env[]",
        f"oldSelf.hasValue() || !({_RESERVED})",
        lambda variable: variable.name not in RESERVED_ENV,
        lambda old, new: old.name == new.name,
        "HOME, PATH and the variables by which the loader, Python or the GPU's driver choose what they load "
        "are the pod's own; leave them out.",
    ),
)
