"""Rules for what is new: a stored object that breaks one keeps serving, scaling and being edited elsewhere.

Rules of `rules.py` hold for every object. Those here came later than objects that break them: the API server asks them
with `optionalOldSelf`, so that an update passes where the old object broke the rule in the same way. `millstream
validate` asks them of a file, as of a new object; the operator asks none of them of what is stored. One without CEL is
asked of files alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.model import CacheAccessMode
from millstream_operator.api.pod_template import ResourceRequirements
from millstream_operator.api.quantity import amount
from millstream_operator.api.rules import Violation, values_at
from millstream_operator.api.spec import LLMDeploymentSpec, ServiceType
from millstream_operator.api.validation.allowed import NOTHING, Allowed
from millstream_operator.api.validation.author_rules import author_ratchets
from millstream_operator.api.validation.environment_rules import environment_ratchets
from millstream_operator.api.validation.ratchet import Ratchet
from millstream_operator.api.validation.size_rules import SIZE_RATCHETS


def new_violations(deployment: LLMDeployment, allowed: Allowed = NOTHING) -> Iterator[Violation]:
    """The ratchets that `deployment` breaks as a new object. `allowed`: what the cluster accepts besides."""
    for ratchet in ratchets(allowed):
        for path, value in values_at(deployment, ratchet.path):
            if not ratchet.holds(value):
                message = ratchet.message if ratchet.message_of is None else ratchet.message_of(value)
                yield Violation(path, message, ratchet.shown(value) if ratchet.shown is not None else None)


def ratchets(allowed: Allowed = NOTHING) -> tuple[Ratchet, ...]:
    """Return all of them; `allowed` as for `new_violations`."""
    return (*_OF_EVERY_CLUSTER, *SIZE_RATCHETS, *author_ratchets(allowed), *environment_ratchets(allowed.env))


def is_exposed(spec: LLMDeploymentSpec) -> bool:
    """Whether the Service can be reached from outside the cluster, and the spec does not say who may ask."""
    kind = spec.service.type if spec.service is not None else None
    decided = spec.auth is not None and (spec.auth.mode, spec.auth.api_keys_secret_ref) != (None, None)
    return kind not in (None, ServiceType.CLUSTER_IP) and not decided


def _exposed(spec: str) -> str:
    """`is_exposed` in CEL."""
    return (
        f"(has({spec}.service) && has({spec}.service.type) && {spec}.service.type != 'ClusterIP' && "
        f"!(has({spec}.auth) && (has({spec}.auth.mode) || has({spec}.auth.apiKeysSecretRef))))"
    )


def is_scaled_on_one_node(spec: LLMDeploymentSpec) -> bool:
    """Whether an autoscaler may add replicas, and pods of one node alone can mount the model's cache."""
    cache, scaling = spec.model.cache, spec.autoscaling
    if cache is None or scaling is None or scaling.max_replicas <= 1:
        return False
    return cache.access_mode not in (None, CacheAccessMode.READ_WRITE_MANY)


def _scaled_on_one_node(spec: str) -> str:
    """`is_scaled_on_one_node` in CEL."""
    return (
        f"(has({spec}.model.cache) && has({spec}.model.cache.accessMode) && "
        f"{spec}.model.cache.accessMode != 'ReadWriteMany' && has({spec}.autoscaling) && "
        f"{spec}.autoscaling.maxReplicas > 1)"
    )


def _request_within_limit(path: str, resource: str) -> Ratchet:
    """The API server refuses every pod of which a container requests more than its limit.

    It cannot compare them in the object itself: it takes a quantity, a number or a text, to be as long as a request may
    be, 3 MiB, so that one comparison exceeds the budget of all rules.
    """

    def amounts(resources: ResourceRequirements) -> dict[str, str]:
        given = {"requests": resources.requests, "limits": resources.limits}
        some = {part: one.model_dump(by_alias=True).get(resource) for part, one in given.items() if one is not None}
        return {part: one for part, one in some.items() if one is not None}

    def holds(resources: ResourceRequirements) -> bool:
        found = amounts(resources)
        return len(found) < 2 or amount(found["requests"]) <= amount(found["limits"])

    return Ratchet(
        path,
        None,
        holds,
        f"must not request more {resource} than its limit, or no pod can be made of it: lower requests.{resource}, or "
        f"raise limits.{resource}.",
        lambda resources: {f"{part}.{resource}": one for part, one in amounts(resources).items()},
    )


_OF_EVERY_CLUSTER: tuple[Ratchet, ...] = (
    Ratchet(
        "spec",
        f"!{_exposed('self')} || (oldSelf.hasValue() && {_exposed('oldSelf.value()')} && "
        "oldSelf.value().service.type == self.service.type)",
        lambda spec: not is_exposed(spec),
        "service.type NodePort or LoadBalancer lets everyone outside the cluster use the model: give "
        "auth.apiKeysSecretRef, or say auth.mode: Disabled.",
    ),
    Ratchet(
        "spec",
        f"!{_scaled_on_one_node('self')} || (oldSelf.hasValue() && {_scaled_on_one_node('oldSelf.value()')})",
        lambda spec: not is_scaled_on_one_node(spec),
        "model.cache.accessMode must be ReadWriteMany where autoscaling.maxReplicas is more than 1: replicas on "
        "another node could not mount the volume. Set it to ReadWriteMany, or maxReplicas to 1.",
    ),
    Ratchet(
        "spec.engine.maxModelLen",
        "self >= 2 || (oldSelf.hasValue() && oldSelf.value() < 2)",
        lambda length: length >= 2,
        "must be at least 2: a token of the prompt and one of the answer.",
    ),
    *(
        _request_within_limit(f"spec.podTemplate.spec.{kind}[].resources", resource)
        for kind in ("containers", "initContainers")
        for resource in ("cpu", "memory", "ephemeral-storage")
    ),
)
RATCHETS = ratchets()  # of the CRD; the chart adds names to it
