"""Diagnose refusals by admission: quotas, Pod Security, policies, webhooks, LimitRanges. Pure.

The same messages come from two places: the API server's answer to a write of ours, and, for pods, the Deployment's
`ReplicaFailure` condition, because the ReplicaSet controller creates them.
"""

from __future__ import annotations

import re

from millstream_operator.diagnosis.diagnosis import Diagnosis, sentence
from millstream_operator.diagnosis.reasons import Reason

NOT_JUDGED_YET = "a policy of the chart cannot judge yet"  # as the cause of a diagnosis: soon over
_QUOTA = re.compile(r"exceeded quota: (\S+), requested: (.+), used: (.+), limited: (.+)$")
_QUOTA_NEEDS = re.compile(r"failed quota: ([^:]+): must specify (.+)$")
_POD_SECURITY = re.compile(r'violates PodSecurity "([^"]+)": (.+)$')
_POLICY = re.compile(r"ValidatingAdmissionPolicy '([^']+)'(?: with binding '([^']+)')? denied request: (.+)$")
# What the API server says where a policy judges nothing yet: its parameters, or their kind, are not known to it.
_NOT_JUDGED = re.compile(r"failed to configure (?:policy|binding): (.+)$")
# The chart's own policies, `templates/admission-*.yaml`.
OWN_POLICIES = ".policy.millstream.dev"
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
        if found[1].endswith(OWN_POLICIES):
            return _own_policy(found[1], found[3], what)
        binding = f" (binding {found[2]})" if found[2] else ""
        said = f"The ValidatingAdmissionPolicy {found[1]}{binding} denies the {what}: {found[3]}"
    elif (found := _WEBHOOK.search(message)) is not None:
        said = f"The admission webhook {found[1]} denies the {what}: {found[2] or 'without a reason'}"
    elif (found := _LIMIT_RANGE.search(message)) is not None:
        said = f"A LimitRange of the namespace does not admit the {what}: {found[1]}"
    elif "admission webhook" in message:
        said = f"The cluster does not admit the {what}: {message}"
    return Diagnosis(Reason.ADMISSION_DENIED, sentence(said)) if said else None


def _own_policy(policy: str, said: str, what: str) -> Diagnosis:
    """Return a refusal by the policies that bound what the operator's own user may write.

    The policies speak of the LLMDeployment, its namespace and its pods, because a user reads them here.
    """
    if (unready := _NOT_JUDGED.match(said)) is not None:
        detail = f"Millstream's policy {policy} does not admit the {what} yet: {unready[1]}"
        hint = (
            "The API server has not seen this namespace's LLMDeployment yet, which takes up to a minute after the "
            "chart was installed; the operator tries again. If it stays, set admissionPolicy.requireLLMDeployment: "
            "false in the chart."
        )
        return Diagnosis(Reason.ADMISSION_UNAVAILABLE, sentence(detail), hint, NOT_JUDGED_YET)
    return Diagnosis(
        Reason.ADMISSION_DENIED, sentence(f"Millstream's policy {policy} does not admit the {what}: {said}")
    )


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
