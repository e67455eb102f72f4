"""How large a spec may be: the operator and etcd hold each one several times, in the object and in its revisions.

The API server counts long texts, since it cannot add up lengths. The size of the whole is checked in files by
`millstream validate`, and by the operator before it makes a new plan. What is stored stays as it is, and what runs
keeps running.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from millstream_operator.api.pod_template import EnvVar
from millstream_operator.api.spec import LLMDeploymentSpec
from millstream_operator.api.validation.ratchet import Ratchet

MAX_SPEC_BYTES = 128 << 10
LONG_TEXT = 512  # characters
MAX_LONG_ANNOTATIONS = 8
MAX_LONG_VARIABLES = 16


def spec_bytes(spec: LLMDeploymentSpec) -> int:
    """Return the length of the spec as JSON."""
    text = json.dumps(spec.model_dump(mode="json", by_alias=True, exclude_none=True), ensure_ascii=False)
    return len(text.encode())


def too_large(spec: LLMDeploymentSpec) -> str | None:
    """What to say of a spec that is too large; None where it is not."""
    num_bytes = spec_bytes(spec)
    if num_bytes <= MAX_SPEC_BYTES:
        return None
    return (
        f"the spec has {num_bytes} bytes as JSON, and at most {MAX_SPEC_BYTES} are taken. Shorten the values of "
        "podTemplate.metadata.annotations and podTemplate.spec.containers[].env (long ones belong in a ConfigMap, "
        "named by valueFrom.configMapKeyRef), or the lists of podTemplate.spec.affinity and network."
    )


def _num_long(texts: Iterable[str | None]) -> int:
    return sum(len(text) > LONG_TEXT for text in texts if text is not None)


def _variables(env: Iterable[EnvVar]) -> int:
    return _num_long(variable.value for variable in env)


def _at_most(long_ones: str, most: int) -> str:
    """CEL: `long_ones` of the new value are at most `most`, or no more than the stored value has."""
    now, before = (f"{long_ones.format(value)}.size()" for value in ("self", "old"))
    # The list of one is there for the API server's estimate of the cost: see `environment_rules.py`.
    return f"{now} <= {most} || (oldSelf.hasValue() && [oldSelf.value()].exists(old, {now} <= {before}))"


SIZE_RATCHETS: tuple[Ratchet, ...] = (
    Ratchet(
        "spec",
        None,
        lambda spec: too_large(spec) is None,
        "the spec is too large.",
        message_of=lambda spec: too_large(spec) or "",
    ),
    Ratchet(
        "spec.podTemplate.metadata.annotations",
        _at_most(f"{{0}}.filter(key, {{0}}[key].size() > {LONG_TEXT})", MAX_LONG_ANNOTATIONS),
        lambda annotations: _num_long(annotations.values()) <= MAX_LONG_ANNOTATIONS,
        f"at most {MAX_LONG_ANNOTATIONS} annotations may be longer than {LONG_TEXT} characters: the operator holds "
        "them with every revision. Shorten the others, or leave them out.",
    ),
    Ratchet(
        "spec.podTemplate.spec.containers[].env",
        _at_most(
            f"{{0}}.filter(variable, has(variable.value) && variable.value.size() > {LONG_TEXT})", MAX_LONG_VARIABLES
        ),
        lambda env: _variables(env) <= MAX_LONG_VARIABLES,
        f"at most {MAX_LONG_VARIABLES} values of variables may be longer than {LONG_TEXT} characters: the operator "
        "holds them with every revision. Put the others in a ConfigMap, and name it in valueFrom.configMapKeyRef.",
    ),
)
