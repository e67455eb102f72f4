"""How simulated pods live: kwok's Stages. They are kwok's own fast ones, and one thing more: an inspection answers.

    bound      -> Running and Ready at once, the init containers done
    that fails -> of a revision with the label of FAILS_LABEL: ended with an error that no other try mends
    of a Job   -> Succeeded; the pod of an inspection leaves the shape of a model as its termination message
    deleted    -> gone at once

A simulated pod reads no model. What it says is what the runtime's own code reads of the demo model, so an LLMDeployment
that needs an inspection is planned as it would be with that model, whatever source it names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from millstream_operator.rendering.names import INSPECTION_LABEL
from millstream_runtime.sources.inspection.inspect import inspect_folder

MODEL = Path(__file__).resolve().parents[2] / "models" / "demo-chat"
FAILS_LABEL = "soak.millstream.dev/fails"
_REPORT = json.dumps({"reason": "CheckpointInvalid", "message": "model.safetensors has the wrong size."})
_ALIVE = {"key": ".metadata.deletionTimestamp", "operator": "DoesNotExist"}

_ON_ITS_NODE = """hostIP: {{ NodeIPWith .spec.nodeName | Quote }}
podIP: {{ PodIPWith .spec.nodeName (or .spec.hostNetwork false) (or .metadata.uid "") (or .metadata.name "")
  (or .metadata.namespace "") | Quote }}
phase: Running
startTime: {{ $now | Quote }}
"""

_READY = """
{{ $now := Now }}
conditions:
{{ range $type := list "Initialized" "Ready" "ContainersReady" }}
- {type: {{ $type }}, status: "True", lastTransitionTime: {{ $now | Quote }}}
{{ end }}
containerStatuses:
{{ range .spec.containers }}
- name: {{ .name | Quote }}
  image: {{ .image | Quote }}
  ready: true
  started: true
  restartCount: 0
  state: {running: {startedAt: {{ $now | Quote }}}}
{{ end }}
initContainerStatuses:
{{ range .spec.initContainers }}
- name: {{ .name | Quote }}
  image: {{ .image | Quote }}
  ready: true
  restartCount: 0
  state: {terminated: {exitCode: 0, reason: Completed, startedAt: {{ $now | Quote }}, finishedAt: {{ $now | Quote }}}}
{{ end }}
"""

_FAILED = """
{{ $now := Now }}
conditions:
- {type: Initialized, status: "True", lastTransitionTime: {{ $now | Quote }}}
- {type: Ready, status: "False", reason: ContainersNotReady, lastTransitionTime: {{ $now | Quote }}}
- {type: ContainersReady, status: "False", reason: ContainersNotReady, lastTransitionTime: {{ $now | Quote }}}
containerStatuses:
{{ range .spec.containers }}
- name: {{ .name | Quote }}
  image: {{ .image | Quote }}
  ready: false
  started: false
  restartCount: 1
  state: {waiting: {reason: CrashLoopBackOff}}
  lastState:
    terminated:
      exitCode: 1
      reason: Error
      startedAt: {{ $now | Quote }}
      finishedAt: {{ $now | Quote }}
      message: {{ `MESSAGE` | Quote }}
{{ end }}
"""

_COMPLETE = """
{{ $now := Now }}
{{ $root := . }}
containerStatuses:
{{ range .spec.containers }}
- name: {{ .name | Quote }}
  image: {{ .image | Quote }}
  ready: false
  started: false
  restartCount: 0
  state:
    terminated:
      exitCode: 0
      reason: Completed
      startedAt: {{ $now | Quote }}
      finishedAt: {{ $now | Quote }}
      {{ if index $root.metadata.labels "INSPECTION_LABEL" }}
      message: {{ `MESSAGE` | Quote }}
      {{ end }}
{{ end }}
phase: Succeeded
"""


def stages() -> str:
    """kwok's configuration file: a Stage a document."""
    shape = json.dumps(inspect_folder(MODEL), separators=(",", ":"))
    complete = _COMPLETE.replace("INSPECTION_LABEL", INSPECTION_LABEL).replace("MESSAGE", shape)
    failed = _FAILED.replace("MESSAGE", _REPORT)
    not_yet = {"key": ".status.podIP", "operator": "DoesNotExist"}
    running = {"key": ".status.phase", "operator": "In", "values": ["Running"]}
    of_a_job = {"key": ".metadata.ownerReferences.[].kind", "operator": "In", "values": ["Job"]}
    fails = {"key": f'.metadata.labels["{FAILS_LABEL}"]', "operator": "Exists"}
    works = fails | {"operator": "DoesNotExist"}
    documents = (
        _stage("pod-ready", [_ALIVE, not_yet, works], {"statusTemplate": _READY + _ON_ITS_NODE}),
        _stage("pod-fails", [_ALIVE, not_yet, fails], {"statusTemplate": failed + _ON_ITS_NODE}),
        _stage("pod-complete", [_ALIVE, running, of_a_job], {"statusTemplate": complete}),
        _stage(
            "pod-delete",
            [{"key": ".metadata.deletionTimestamp", "operator": "Exists"}],
            {"finalizers": {"empty": True}, "delete": True},
        ),
    )
    return "---\n".join(json.dumps(document) + "\n" for document in documents)


def _stage(name: str, expressions: list[dict[str, Any]], then: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "kwok.x-k8s.io/v1alpha1",
        "kind": "Stage",
        "metadata": {"name": name},
        "spec": {
            "resourceRef": {"apiGroup": "v1", "kind": "Pod"},
            "selector": {"matchExpressions": expressions},
            "next": then,
        },
    }
