"""Environment variables that are new in the operator's default image: those of `accepted_variables.py` alone.

An image of the author's own (`runtime.image`) takes any: whoever wrote it decides what it loads. So the rules stand at
`spec`, which has both. A variable that is stored already stays where it is and may be edited, but for one thing: an
object that leaves its own image brings all its variables to the default image, and there they are new.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from millstream_operator.api.spec import LLMDeploymentSpec
from millstream_operator.api.validation.accepted_variables import ACCEPTED, FAMILY_PATTERN, OTHERS_PREFIX, is_accepted
from millstream_operator.api.validation.ratchet import Ratchet

_REFUSED = (
    "of podTemplate.spec.containers[].env is not accepted in the default image, where no variable may decide what code "
    "is loaded. Leave it out, or name an image of your own in runtime.image. `kubectl explain "
    "llmd.spec.podTemplate.spec.containers.env` lists what is accepted; the chart value runtime.allowedEnv adds names."
)
_OF_VLLM = (
    "variables of podTemplate.spec.containers[].env that start with VLLM_ are settings of another server: nothing here "
    "reads them. Leave them out: instead of VLLM_API_KEY give auth.apiKeysSecretRef, of VLLM_LOGGING_LEVEL "
    "runtime.logLevel, of VLLM_PORT service.port, of VLLM_TARGET_DEVICE accelerator.type, of "
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN engine.maxModelLen, of VLLM_CPU_KVCACHE_SPACE and VLLM_CPU_OMP_THREADS_BIND "
    "podTemplate.spec.containers[].resources; the operator chooses the rest."
)


def environment_ratchets(added: Collection[str] = ()) -> tuple[Ratchet, Ratchet]:
    """Return the rules. `added`: names that are accepted besides, as by the chart's runtime.allowedEnv."""
    names = ", ".join(f"'{name}'" for name in (*ACCEPTED, *added))
    accepted = f"variable.name in [{names}] || variable.name.matches('{FAMILY_PATTERN}')"
    is_of_vllm = f"variable.name.startsWith('{OTHERS_PREFIX}')"
    fine = f"{accepted} || {is_of_vllm}"
    refused = partial(_refused, added=added)
    return (
        Ratchet(
            "spec",
            _each_variable(f"{fine} || {_STORED}"),
            lambda spec: not refused(spec),
            f"a variable {_REFUSED}",
            message_of=lambda spec: f"{refused(spec)[-1]} {_REFUSED}",
            message_cel=_last_variable(f"!({fine})", _REFUSED),
        ),
        Ratchet(
            "spec",
            _each_variable(f"!{is_of_vllm} || {_STORED}"),
            lambda spec: not any(name.startswith(OTHERS_PREFIX) for name in _names_in_default_image(spec)),
            _OF_VLLM,
        ),
    )


def _has_own_image(spec: str) -> str:
    return f"(has({spec}.runtime) && has({spec}.runtime.image))"


def _has_containers(spec: str) -> str:
    return f"(has({spec}.podTemplate) && has({spec}.podTemplate.spec) && has({spec}.podTemplate.spec.containers))"


def _each_variable(test: str) -> str:
    """CEL: `test` holds for each `variable`, or the spec has its own image."""
    return (
        f"{_has_own_image('self')} || !{_has_containers('self')} || self.podTemplate.spec.containers.all(container, "
        f"!has(container.env) || container.env.all(variable, {test}))"
    )


def _last_variable(test: str, text: str) -> str:
    """CEL: the last name for which `test` holds, and `text`.

    A message has no `oldSelf` (Kubernetes 1.34 gives it one of another type than the rule), so it cannot leave out what
    is stored. The last one is most often what was added. There is one container. The text is added within the list,
    where the API server knows how long a name is at most.
    """
    variables = "self.podTemplate.spec.containers[0].env"
    named = f"{variables}.map(variable, {test}, variable.name + ' {text}')"
    return f"{named}[{variables}.filter(variable, {test}).size() - 1]"


# CEL: the default image has `variable` already. The list of one is there for the API server's estimate of the cost: it
# knows the bounds of what a list's items hold, and nothing of what a function returns.
_STORED = (
    f"(oldSelf.hasValue() && [oldSelf.value()].exists(old, !{_has_own_image('old')} && {_has_containers('old')} && "
    "old.podTemplate.spec.containers.exists(before, has(before.env) && "
    "before.env.exists(stored, stored.name == variable.name))))"
)


def _names_in_default_image(spec: LLMDeploymentSpec) -> list[str]:
    if spec.runtime is not None and spec.runtime.image is not None:
        return []
    pod = spec.pod_template.spec if spec.pod_template is not None else None
    containers = (pod.containers if pod is not None else None) or ()
    return [variable.name for container in containers for variable in container.env or ()]


def _refused(spec: LLMDeploymentSpec, added: Collection[str]) -> list[str]:
    """Return the names that the first rule refuses, in their order."""
    names = _names_in_default_image(spec)
    return [name for name in names if not is_accepted(name, added) and not name.startswith(OTHERS_PREFIX)]
