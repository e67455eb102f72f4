"""What is left to administrators: exceptions from the restricted profile, the system's priority, pods without a policy.

Whoever may create an LLMDeployment need not have these rights on pods, Deployments and NetworkPolicies, which the
operator makes for them. What is stored stays as it is, until an edit changes it.
"""

from __future__ import annotations

import re

from millstream_operator.api.access import NetworkMode
from millstream_operator.api.validation.allowed import Allowed
from millstream_operator.api.validation.ratchet import Ratchet

PROFILE_KEY_PATTERN = "^([^/]*[.])?(apparmor|seccomp)[.][^/]*/"
# No object can have them, so that the lists, to which the chart adds, are never empty.
NO_KEY, NO_PRIORITY_CLASS = "apparmor./", "system-"
# Neither a colon nor a quote within: the chart looks for the lists in the CRD's text, where YAML writes them plainly.
_PROFILE = (
    "of podTemplate.metadata.annotations is not accepted, because a pod with an AppArmor or seccomp profile of its own "
    "may not meet the restricted Pod Security profile. Leave it out. Without it seccomp is RuntimeDefault, "
    "and AppArmor the default of the node. The chart value authors.allowedAnnotations adds keys, for sidecars of a "
    "mesh or of Vault."
)
_PRIORITY = (
    "of podTemplate.spec.priorityClassName is not accepted, because pods of the system evict others, those of the node "
    "among them. Name another PriorityClass, or leave it out. The chart value authors.allowedPriorityClasses adds "
    "names."
)
_NO_POLICY = (
    "mode Disabled is left to administrators: the pods would have no NetworkPolicy. Leave it out, and name in "
    "network.ingress and network.egress whom the pods must reach. The chart value authors.networkModeDisabled allows "
    "it."
)


def author_ratchets(allowed: Allowed) -> tuple[Ratchet, ...]:
    """Return the rules. `allowed`: exceptions, as by the chart's values."""
    return (_annotations(allowed), _priority_class(allowed), _network_mode(allowed))


def _annotations(allowed: Allowed) -> Ratchet:
    keys = [NO_KEY, *allowed.annotations]
    refused = f"key.matches('{PROFILE_KEY_PATTERN}') && !(key in {_listed(keys)})"

    def refused_keys(annotations: dict[str, str]) -> list[str]:
        return [key for key in annotations if re.match(PROFILE_KEY_PATTERN, key) and key not in keys]

    # The list of one is there for the API server's estimate of the cost: see `environment_rules.py`.
    stored = "oldSelf.hasValue() && [oldSelf.value()].exists(old, key in old && old[key] == self[key])"
    return Ratchet(
        "spec.podTemplate.metadata.annotations",
        f"self.all(key, !({refused}) || ({stored}))",
        lambda annotations: not refused_keys(annotations),
        f"a key {_PROFILE}",
        message_of=lambda annotations: f"{refused_keys(annotations)[0]} {_PROFILE}",
        message_cel=f"self.filter(key, {refused})[0] + ' {_PROFILE}'",
    )


def _priority_class(allowed: Allowed) -> Ratchet:
    names = [NO_PRIORITY_CLASS, *allowed.priority_classes]
    return Ratchet(
        "spec.podTemplate.spec.priorityClassName",
        f"self in {_listed(names)} || !self.startsWith('system-') || (oldSelf.hasValue() && oldSelf.value() == self)",
        lambda name: not name.startswith("system-") or name in names,
        f"a class {_PRIORITY}",
        message_of=lambda name: f"{name} {_PRIORITY}",
        message_cel=f"self + ' {_PRIORITY}'",
    )


def _network_mode(allowed: Allowed) -> Ratchet:
    modes = [NetworkMode.MANAGED.value, *([NetworkMode.DISABLED.value] if allowed.network_mode_disabled else [])]
    return Ratchet(
        "spec.network.mode",
        f"self in {_listed(modes)} || (oldSelf.hasValue() && oldSelf.value() == self)",
        lambda mode: mode in modes,
        _NO_POLICY,
    )


def _listed(names: list[str]) -> str:
    quoted = ", ".join(f"'{name}'" for name in names)
    return f"[{quoted}]"
