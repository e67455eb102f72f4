"""Why the scheduler finds no node for a pod, as a sentence that says what is short and on how many nodes. Pure.

    0/3 nodes are available: 1 node(s) had untolerated taint(s), 2 Insufficient nvidia.com/gpu. preemption: 0/3 …
    -> No node has 4 free nvidia.com/gpu for the pod. Of 3 nodes: 2 without 4 free nvidia.com/gpu; 1 with a taint that
       the pod does not tolerate.

The words are those of kube-scheduler's plugins (`pkg/scheduler/framework/plugins/*`, ErrReason…, Kubernetes 1.34, and
the older form that names the taint). What is not known is passed on as it is. Items are sorted by their words and
not by their counts, which change by themselves.
"""

from __future__ import annotations

import re

from millstream_operator.diagnosis.diagnosis import Diagnosis, sentence
from millstream_operator.diagnosis.pod_facts import Pod, asked_amount, claims, condition
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.inventory.node_affinity import in_words, read_terms
from millstream_operator.planning.plan import GPU_RESOURCE
from millstream_operator.rendering.kueue import is_gated_by_kueue, queue_of
from millstream_operator.rendering.model_cache import is_cache_of

_HEAD = re.compile(r"^0/(\d+) nodes are available: ?")
_ITEM = re.compile(r"(\d+) (.+)")
_INSUFFICIENT = re.compile(r"Insufficient (\S+)")
_CLAIM = re.compile(r'persistentvolumeclaim "([^"]+)"')
_PLAIN = {"cpu": "CPU", "ephemeral-storage": "ephemeral storage"}
# The scheduler's words are the same for GPUs that are taken and for GPUs that no node has: the inventory tells.
NO_GPU_NODE = (
    f"No node of the cluster offers {GPU_RESOURCE}: install NVIDIA's device plugin where nodes have GPUs, add such "
    "nodes, or set accelerator.type: CPU."
)

# What a plugin says of a node -> what follows "2" in our sentence.
_OF_NODES: tuple[tuple[str, str], ...] = (
    (r"Too many pods", "without room for another pod"),
    (r"node\(s\) had untolerated taint \{([^:}]+): ?\}", r"with the taint \1 that the pod does not tolerate"),
    (r"node\(s\) had untolerated taint \{([^:}]+): ([^}]+)\}", r"with the taint \1=\2 that the pod does not tolerate"),
    (r"node\(s\) had (untolerated taint\(s\)|taints that .*)", "with a taint that the pod does not tolerate"),
    (r"node\(s\) were unschedulable", "cordoned"),
    (r"node\(s\) didn't have free ports.*", "without the free port that the pod asks for"),
    (r"node\(s\) didn't match pod topology spread constraints.*", "that its spread constraints leave out"),
    (
        r"node\(s\) (didn't match pod|didn't satisfy existing pods) (anti-)?affinity rules",
        "that affinity rules leave out",
    ),
)
_OF_VOLUMES: tuple[tuple[str, str], ...] = (
    (r"node\(s\) (didn't match PersistentVolume's|had volume) node affinity.*", "out of reach of its volume"),
    (r"node\(s\) had no available volume zone", "outside the zone of its volume"),
    (r"node\(s\) didn't find available persistent volumes to bind", "without a volume that its claim could bind to"),
    (r"node\(s\) did not have enough free storage", "without enough free storage for its claim"),
    (r"node\(s\) had no available disk", "where its disk is in use"),
    (
        r"node has pod using PersistentVolumeClaim with the same name.*",
        "where another pod holds its ReadWriteOncePod claim",
    ),
    (r"node\(s\) exceed max volume count", "that cannot attach another volume"),
    (
        r"node(?:\(s\))? has pod using PersistentVolumeClaim with the same name and ReadWriteOncePod.*",
        "where another pod holds its claim (ReadWriteOncePod)",
    ),
    (r"node\(s\) unavailable due to (one or more pvc|PersistentVolumeClaim).*", "that cannot use its claim"),
)


def diagnose_scheduling(pod: Pod) -> Diagnosis | None:
    """Return why a pod has no node; None where it has one, or where the scheduler has not tried yet."""
    scheduled = condition(pod, "PodScheduled")
    if scheduled.get("status") != "False":
        return None
    if scheduled.get("reason") == "SchedulingGated":  # no failure
        return _of_a_queue(pod) if is_gated_by_kueue(pod) else None
    message = scheduled.get("message") or ""
    if scheduled.get("reason") == "SchedulerError":
        reason = Reason.VOLUME_PENDING if "binding volumes" in message else Reason.UNSCHEDULABLE
        return Diagnosis(reason, sentence(f"The scheduler could not place the pod: {message}"))
    return _of_claims(pod, message) or _of_the_nodes(pod, message)


def _of_a_queue(pod: Pod) -> Diagnosis:
    """Return that a pod waits for Kueue: it is created and scheduled once its queue has quota."""
    queue = f"in the LocalQueue {queue_of(pod)} " if queue_of(pod) else ""
    return Diagnosis(
        Reason.QUOTA_EXCEEDED,
        f"The pod waits {queue}until Kueue admits it; `kubectl get workloads` in its namespace shows the quota that is "
        "missing. It starts once there is enough.",
    )


def _of_claims(pod: Pod, message: str) -> Diagnosis | None:
    """Return the problem of a claim that keeps the pod from every node."""
    names = ", ".join(claims(pod))
    if "unbound immediate PersistentVolumeClaims" in message:
        return Diagnosis(
            Reason.VOLUME_PENDING,
            f"The PersistentVolumeClaim {names or '?'} is not bound to a volume; `kubectl describe pvc` says why (no "
            "StorageClass, a provisioner that fails, no volume that fits).",
        )
    if (found := _CLAIM.search(message)) is None:
        return None
    name = found[1]
    said = _said_of_claim(name, message[found.end() :].lstrip(), is_cache=is_cache_of(pod, name))
    return Diagnosis(Reason.VOLUME_PENDING, sentence(f"The PersistentVolumeClaim {name} {said}"))


def _said_of_claim(name: str, rest: str, *, is_cache: bool) -> str:
    """`rest`: what the scheduler says of the claim. `is_cache`: the operator creates it."""
    if rest.startswith("not found"):
        if is_cache:
            return "of model.cache does not exist at the moment: the operator creates it, and the pod starts"
        return "does not exist in this namespace: create it, or correct the claimName"
    if rest.startswith("is being deleted"):
        if is_cache:
            return (
                "of model.cache is being deleted, and stays until the pods that mount it have ended (`kubectl describe "
                f"pvc {name}` names them). The operator then creates it anew, and the pod starts"
            )
        return "is being deleted: create another one, or name another claim"
    return f"cannot be used: {_without_preemption(rest).strip()}"


def _of_the_nodes(pod: Pod, message: str) -> Diagnosis:
    head = _HEAD.match(message)
    if head is None:
        return Diagnosis(Reason.UNSCHEDULABLE, sentence(f"No node takes the pod: {message}"))
    said = [_ITEM.fullmatch(item) for item in re.split(r", (?=\d+ )", _without_preemption(message[head.end() :]))]
    items = [(item[1], item[2]) for item in said if item is not None]
    if not items:
        return Diagnosis(Reason.UNSCHEDULABLE, sentence(f"No node takes the pod: {message}"))
    reason, opening = _judged(pod, [text for _, text in items])
    parts = sorted((_rank(text), _words(pod, text), count) for count, text in items)
    details = "; ".join(f"{count} {words}" for _, words, count in parts)
    return Diagnosis(reason, sentence(f"{opening} Of {head[1]} nodes: {details}"))


def _judged(pod: Pod, texts: list[str]) -> tuple[Reason, str]:
    """Return the reason, and the opening of the sentence: the scarce resource first, then volumes."""
    if any(_INSUFFICIENT.fullmatch(text) and GPU_RESOURCE in text for text in texts):
        return Reason.INSUFFICIENT_GPU, f"No node has {_amount(pod, GPU_RESOURCE)} for the pod."
    if any(_matched(_OF_VOLUMES, text) for text in texts):
        return Reason.VOLUME_PENDING, f"No node can use the pod's volume ({', '.join(claims(pod)) or '?'})."
    return Reason.UNSCHEDULABLE, "No node takes the pod."


def _words(pod: Pod, text: str) -> str:
    if (short := _INSUFFICIENT.fullmatch(text)) is not None:
        return f"without {_amount(pod, short[1])}"
    if "node affinity/selector" in text:
        return f"that {_selection(pod)} leaves out"
    return _matched(_OF_NODES + _OF_VOLUMES, text) or text.removeprefix("node(s) ")


def _amount(pod: Pod, resource: str) -> str:
    asked = asked_amount(pod, resource)
    return f"{asked or 'enough'} free {_PLAIN.get(resource, resource)}"


def _selection(pod: Pod) -> str:
    """The labels that the pod asks of a node."""
    spec = pod.get("spec", {})
    wanted = [f"{key}={value}" for key, value in sorted((spec.get("nodeSelector") or {}).items())]
    if terms := read_terms(spec.get("affinity") or {}):
        wanted.append(in_words(terms))
    return " and ".join(wanted) or "its node selector"


def _rank(text: str) -> int:
    return 0 if _INSUFFICIENT.fullmatch(text) else 1


def _matched(table: tuple[tuple[str, str], ...], text: str) -> str | None:
    for pattern, words in table:
        if (found := re.fullmatch(pattern, text)) is not None:
            return found.expand(words)
    return None


def _without_preemption(text: str) -> str:
    """Without what follows the nodes: that preemption would not help, nor a ResourceClaim that could be given up."""
    return re.split(r"preemption: |no new claims to deallocate", text, maxsplit=1)[0].rstrip("., ")
