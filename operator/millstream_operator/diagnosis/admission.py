"""Diagnose refusals by admission: quotas, Pod Security, policies, webhooks, LimitRanges. Pure.

The same messages come from two places: the API server's answer to a write of ours, and, for pods, the Deployment's
`ReplicaFailure` condition, because the ReplicaSet controller creates them.
"""

from __future__ import annotations

import re

from millstream_operator.diagnosis.diagnosis import Diagnosis, sentence
from millstream_operator.diagnosis.reasons import Reason

_QUOTA = re.compile(r"exceeded quota: (\S+), requested: (.+), used: (.+), limited: (.+)$")
_QUOTA_NEEDS = re.compile(r"failed quota: ([^:]+): must specify (.+)$")
_POD_SECURITY = re.compile(r'violates PodSecurity "([^"]+)": (.+)$')
_POLICY = re.compile(r"ValidatingAdmissionPolicy '([^']+)' with binding '([^']+)' denied request: (.+)$")
_WEBHOOK = re.compile(r'admission webhook "([^"]+)" denied the request(?: without explanation|: (.+))$')
_WEBHOOK_AWAY = re.compile(r'failed calling webhook "([^"]+)"[^:]*: (.+)$')
_LIMIT_RANGE = re.compile(r"((?:maximum|minimum) \S+ (?:usage per|limit to request ratio per) .+)$")


def pods_not_created(message: str) -> Diagnosis | None:
    """Return why pods could not be created, from the message of `ReplicaFailure`; None for what passes in a moment."""
    if "error looking up service account" in message:
        return None  # the ServiceAccount is ours, and is restored
    # 'pods "demo-7d9c-x2x8k" is forbidden': each try has another name
    stable = re.sub(r'pods "[^"]*"', "pods", message)
    found = admission_refusal(stable, "pods")
    return found or Diagnosis(Reason.ADMISSION_DENIED, sentence(f"Pods cannot be created: {stable}"))


def admission_refusal(message: str, what: str) -> Diagnosis | None:
    """Return the refusal of `what` by an admission plugin; None for any other refusal."""
    message = " ".join(message.split())
    if "quota: " in message:
        return _quota(message, what)
    if (found := _WEBHOOK_AWAY.search(message)) is not None:
        said = f"The admission webhook {found[1]}, which must admit the {what}, does not answer: {found[2]}"
        return Diagnosis(Reason.ADMISSION_UNAVAILABLE, sentence(said))
    said = ""
    if (found := _POD_SECURITY.search(message)) is not None:
        said = f"The namespace's Pod Security level {found[1]} does not admit the {what}: {found[2]}"
    elif (found := _POLICY.search(message)) is not None:
        said = f"The ValidatingAdmissionPolicy {found[1]} (binding {found[2]}) denies the {what}: {found[3]}"
    elif (found := _WEBHOOK.search(message)) is not None:
        said = f"The admission webhook {found[1]} denies the {what}: {found[2] or 'without a reason'}"
    elif (found := _LIMIT_RANGE.search(message)) is not None:
        said = f"A LimitRange of the namespace does not admit the {what}: {found[1]}"
    elif "admission webhook" in message:
        said = f"The cluster does not admit the {what}: {message}"
    return Diagnosis(Reason.ADMISSION_DENIED, sentence(said)) if said else None


def _quota(message: str, what: str) -> Diagnosis | None:
    if (found := _QUOTA_NEEDS.search(message)) is not None:
        said = f"The ResourceQuota {found[1]} admits only {what} that specify {found[2]}: set it in spec.podTemplate"
        return Diagnosis(Reason.ADMISSION_DENIED, sentence(said))
    if (found := _QUOTA.search(message)) is not None:
        wanted, used, limit = (_amounts(found[part]) for part in (2, 3, 4))
        short = "; ".join(
            f"{name}: {amount} more requested, {used.get(name, '?')} of {limit.get(name, '?')} used"
            for name, amount in wanted.items()
        )
        said = f"The ResourceQuota {found[1]} does not allow the {what} ({short})"
        return Diagnosis(Reason.QUOTA_EXCEEDED, sentence(said))
    if "exceeded quota" in message:
        said = f"The namespace's quota does not allow the {what}: {message}"
        return Diagnosis(Reason.QUOTA_EXCEEDED, sentence(said))
    return None


def _amounts(text: str) -> dict[str, str]:
    """`pods=1,requests.cpu=2` -> {"pods": "1", "requests.cpu": "2"}."""
    return dict(part.split("=", 1) for part in text.split(",") if "=" in part)
