"""Why a container does not run: why it waits, or how it ended last. Pure.

The runtime writes its last error as JSON into its termination message (`millstream_runtime.errors`); where it did, that
is the sentence. Otherwise the exit code is interpreted: a container that was killed before it was ever ready was too
slow for `warmup.timeout`, also with exit code 0, because the runtime ends cleanly on the kubelet's SIGTERM.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from millstream_operator.api.optimization import HEAD_METHODS
from millstream_operator.diagnosis.diagnosis import Diagnosis, sentence
from millstream_operator.diagnosis.memory_explanation import planned_memory
from millstream_operator.diagnosis.pod_facts import (
    Pod,
    draft_fetch_status,
    draft_source_of,
    fetch_status,
    runtime_container,
    runtime_status,
    seconds_between,
    warmup_budget_seconds,
)
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.rendering.api_keys import VOLUME as API_KEYS
from millstream_operator.rendering.names import FETCH_CONTAINER, RUNTIME_CONTAINER
from millstream_runtime.errors import FailureReason

PULL_FAILURES = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"}
)
CONFIG_FAILURES = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
FETCH_MEMORY_FIX = "Raise podTemplate.spec.initContainers[fetch-model].resources.limits.memory."
KINDS = ("initContainers", "containers")
KILLED = (137, 143)  # 128 + SIGKILL, 128 + SIGTERM
# The runtime's own reasons. Another one, of a newer runtime, is a crash whose sentence is passed on.
RUNTIME_REASONS = frozenset(reason for reason in Reason if reason.value in {one.value for one in FailureReason})
# The kubelet's probes begin a moment after the container, and its signal takes a moment to be obeyed.
PROBE_SLACK_SECONDS, SIGNAL_SLACK_SECONDS = 5.0, 60.0


def diagnose_containers(pod: Pod, plan: Mapping[str, Any], phase: str | None) -> Diagnosis | None:
    """Return the failure of the first container, in the order in which they run, that has one.

    `plan` is the pinned `status.plan`; `phase` is where the warm-up was seen last, or None.
    """
    for one in pod.get("status", {}).get("initContainerStatuses") or []:
        if is_own(one, RUNTIME_CONTAINER) and (found := container_waits(one)) is not None:
            return found
    if (found := _fetch_ended(fetch_status(pod)) or _draft_fetch_ended(pod, plan)) is not None:
        return found
    container = runtime_status(pod)
    if (found := container_waits(container, runtime_container(pod).get("image", ""))) is not None:
        return found
    ended = _ended(container)
    if ended and (found := _runtime_ended(ended, pod, plan, phase)) is not None:
        return found
    return diagnose_added_containers(pod, RUNTIME_CONTAINER)


def is_own(container: Mapping[str, Any], main: str) -> bool:
    """Return whether the operator rendered it: the container `main` of the pod, or a download before it."""
    name = str(container.get("name", "?"))
    return name == main or name.endswith(FETCH_CONTAINER)


def diagnose_added_containers(pod: Pod, main: str) -> Diagnosis | None:
    """Return why a container that another party added to the pod does not run, in the order in which they run.

    A webhook of a mesh adds such ones. `main`: the name of our own. What runs now, or ended well, keeps no pod from
    serving.
    """
    status, spec = pod.get("status", {}), pod.get("spec", {})
    statuses = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    images = {one.get("name"): str(one.get("image", "")) for kind in KINDS for one in spec.get(kind) or ()}
    for container in statuses:
        name = str(container.get("name", "?"))
        if is_own(container, main):
            continue
        if (found := container_waits(container, images.get(name, ""), name)) or (found := _crashed(container, name)):
            return found
    return None


def _crashed(container: Mapping[str, Any], name: str) -> Diagnosis | None:
    state = container.get("state", {})
    waits = state.get("waiting", {}).get("reason") == "CrashLoopBackOff"
    ended = _ended(container) if waits else state.get("terminated") or {}
    if not waits and ended.get("exitCode", 0) == 0:
        return None
    how = f"ended with exit code {ended['exitCode']}" if "exitCode" in ended else "ended"
    again, flag = (" and is started again later", " --previous") if waits else ("", "")
    return Diagnosis(
        Reason.CONTAINER_CRASHED,
        f"The container {name}, which is not the operator's, {how}{again}. Its log says why: kubectl logs POD -c "
        f"{name}{flag}.",
    )


def container_waits(container: Mapping[str, Any], image: str = "", added: str = "") -> Diagnosis | None:
    """Return why a container is not created: its image, or what its configuration names.

    `added`: the name of one that is not the operator's, which the sentence of its image then has.
    """
    waiting = container.get("state", {}).get("waiting", {})
    if waiting.get("reason") in PULL_FAILURES:
        of_added = f" of the container {added}" if added else ""
        return _image_pull(f"{image or container.get('image', '?')}{of_added}", waiting.get("message") or "")
    if waiting.get("reason") in CONFIG_FAILURES:
        said = waiting.get("message") or waiting["reason"]
        return Diagnosis(
            Reason.CONTAINER_CONFIG_INVALID,
            sentence(f"The container {container.get('name', '?')} cannot be created: {said}"),
        )
    return None


def _image_pull(image: str, said: str) -> Diagnosis:
    """Return one sentence for ErrImagePull and ImagePullBackOff, so that the status does not alternate with them."""
    said = re.sub(r'^Back-off pulling image "[^"]*"(: )?', "", said)
    said = re.sub(r"^(ErrImagePull|ImagePullBackOff): ", "", said)
    said = re.sub(r"^rpc error: code = \w+ desc = ", "", said)
    said = re.sub(r"\d+\.\d+\.\d+\.\d+:\d+->", "", said)  # our own side of a connection has a new port each time
    detail = sentence(f"The image {image} cannot be pulled{f': {said}' if said else ''}")
    return Diagnosis(Reason.IMAGE_PULL_FAILED, detail, cause=said)


def _fetch_ended(container: Mapping[str, Any], what: str = "model") -> Diagnosis | None:
    """Return why the download failed last, by its termination message where it wrote one."""
    ended = _ended(container)
    if not ended or ended.get("exitCode") == 0:
        return None
    if report := runtime_report(ended.get("message", "")):
        return report
    if ended.get("reason") == "OOMKilled":
        return Diagnosis(
            Reason.OUT_OF_MEMORY,
            f"The kernel killed the {what}'s download at its memory limit. {FETCH_MEMORY_FIX}",
        )
    return Diagnosis(
        Reason.DOWNLOAD_FAILED,
        f"The {what}'s download ended with exit code {ended.get('exitCode')}. Its log says why: kubectl logs POD -c "
        f"{container.get('name', 'fetch-model')} --previous.",
    )


def _draft_fetch_ended(pod: Pod, plan: Mapping[str, Any]) -> Diagnosis | None:
    """Return why the download of the draft model or head failed last, with the field that names it."""
    what = "draft head" if (plan.get("speculation") or {}).get("method") in HEAD_METHODS else "draft model"
    if (found := _fetch_ended(draft_fetch_status(pod), what)) is None:
        return None
    named = " ".join(filter(None, (f"The {what}", draft_source_of(pod))))
    return replace(found, detail=f"{named} (speculation.draftModel.source) cannot be fetched: {found.detail}")


def _runtime_ended(ended: Mapping[str, Any], pod: Pod, plan: Mapping[str, Any], phase: str | None) -> Diagnosis | None:
    code = ended.get("exitCode")
    if code != 0 and (report := runtime_report(ended.get("message", ""))):
        if report.reason is Reason.OUT_OF_MEMORY:
            return Diagnosis(report.reason, sentence(f"{report.message} {planned_memory(plan)}"))
        return _with_the_secret(report, pod) if report.reason is Reason.API_KEYS_INVALID else report
    if ended.get("reason") == "OOMKilled":
        return _killed_for_memory(pod, plan)
    if _was_too_slow(ended, pod):
        return warmup_stalled(pod, phase)
    if code == 0:
        return None
    last_words = str(ended.get("message") or "").strip().splitlines()
    said = f": {last_words[-1]}" if last_words else ". Its log says why: kubectl logs POD -c runtime --previous"
    return Diagnosis(Reason.RUNTIME_CRASHED, sentence(f"The runtime ended with exit code {code}{said}"))


def _with_the_secret(report: Diagnosis, pod: Pod) -> Diagnosis:
    """Return the report with the Secret and the key that its file comes from; an older runtime names a path alone."""
    volumes = {volume.get("name"): volume for volume in pod.get("spec", {}).get("volumes") or ()}
    secret = volumes.get(API_KEYS, {}).get("secret") or {}
    keys = [str(item.get("key")) for item in secret.get("items") or ()]
    if not keys or not secret.get("secretName") or f"Secret {secret['secretName']} " in report.detail:
        return report
    named = f"The key {keys[0]} of the Secret {secret['secretName']} (auth.apiKeysSecretRef)"
    return replace(report, detail=sentence(f"{named} cannot be used, or does not exist: {report.detail}"))


def _killed_for_memory(pod: Pod, plan: Mapping[str, Any]) -> Diagnosis:
    limit = ((runtime_container(pod).get("resources") or {}).get("limits") or {}).get("memory")
    # On a GPU the ledger counts the GPU's memory, which the kernel does not care about.
    ledger = planned_memory(plan) if plan.get("accelerator") == "CPU" else ""
    return Diagnosis(
        Reason.OUT_OF_MEMORY,
        sentence(
            f"The kernel killed the runtime because it passed its memory limit{f' of {limit}' if limit else ''}. "
            f"{ledger} Raise podTemplate.spec.containers[runtime].resources.limits.memory, or lower "
            "engine.maxNumSeqs or engine.maxModelLen."
        ),
    )


def warmup_stalled(pod: Pod, phase: str | None) -> Diagnosis:
    """Return the diagnosis of a container that the kubelet restarted because it was not ready in time."""
    budget = warmup_budget_seconds(pod)
    allowed = f" ({budget:.0f} seconds)" if budget is not None else ""
    where = f" it was still in phase {phase}." if phase else " the kubelet restarted it."
    return Diagnosis(
        Reason.WARMUP_STALLED,
        f"The model was not ready within warmup.timeout{allowed};{where} Raise warmup.timeout, or give the pod more "
        "CPU or a faster disk.",
    )


def _was_too_slow(ended: Mapping[str, Any], pod: Pod) -> bool:
    """Return whether the kubelet's signal ended it at about the time when the startup probe gave up."""
    code = ended.get("exitCode")
    if code not in (0, *KILLED):
        return False
    lived, budget = seconds_between(ended.get("startedAt"), ended.get("finishedAt")), warmup_budget_seconds(pod)
    if lived is None or budget is None:
        return code != 0 and not runtime_status(pod).get("started")
    return budget - PROBE_SLACK_SECONDS <= lived <= budget + SIGNAL_SLACK_SECONDS


def runtime_report(message: str) -> Diagnosis | None:
    """Return what the runtime wrote to its termination log (`millstream_runtime.errors`)."""
    try:
        report = json.loads(message)
        reason, said = report["reason"], report["message"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if not isinstance(said, str):
        return None
    known = Reason(reason) if isinstance(reason, str) and reason in RUNTIME_REASONS else Reason.RUNTIME_CRASHED
    return Diagnosis(known, sentence(said))


def _ended(container: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = (
        container.get("state", {}).get("terminated") or container.get("lastState", {}).get("terminated") or {}
    )
    return found
