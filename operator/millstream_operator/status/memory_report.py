"""`status.memory`: what the plan predicted for one GPU, and what the runtime measured on it. Pure.

The measurement is taken once per revision, from one pod that is the LLMDeployment's own (`probing/pod_measurement.py`):
other pods of the same revision differ by some kilobytes, which must not cause a write.
"""

from __future__ import annotations

from typing import Any

from millstream_operator.planning.calibration import PARTS, UNCHANGED_PERMILLE, absurd
from millstream_operator.planning.measurement import is_measurable
from millstream_operator.status.observation import Observation
from millstream_operator.status.step_report import plan_correction

Manifest = dict[str, Any]


def memory_status(observation: Observation) -> Manifest | None:
    """The field as it is written; None where neither side is known."""
    plan = observation.revision.plan
    predicted, measured = _predicted(plan), measured_memory(observation)
    found = {"predicted": predicted, "measured": measured, "correction": _correction(plan)}
    ignored = _ignored(plan, predicted, measured)
    sides: Manifest = {side: numbers for side, numbers in found.items() if numbers}
    return sides | ({"ignored": ignored} if ignored else {}) or None


def _correction(plan: Manifest) -> Manifest:
    """Return what the plan's own placement was corrected by."""
    found = plan_correction(plan)
    memory = {f"{part}Permille": found.permille(part) for part in PARTS}
    return memory if set(memory.values()) != {UNCHANGED_PERMILLE} else {}


def _ignored(plan: Manifest, predicted: Manifest, measured: Manifest) -> list[str]:
    """Return which measured values correct no later plan, each with the reason."""
    if not predicted or not is_measurable(plan):
        return []
    parts = [part for part in ("weights", "activations", "graphs") if f"{part}Bytes" in measured]
    found = (absurd(part, predicted[f"{part}Bytes"], measured[f"{part}Bytes"]) for part in parts)
    return [why for why in found if why is not None]


def _predicted(plan: Manifest) -> Manifest:
    ledger, predicted = plan.get("memory") or {}, plan.get("predicted") or {}
    if not ledger:
        return {}
    tokens = {"kvCacheTokens": predicted["kvCacheTokens"]} if "kvCacheTokens" in predicted else {}
    return {
        "weightsBytes": sum(ledger.get(key, 0) for key in ("weightsBytes", "embeddingsBytes", "draftWeightsBytes")),
        "activationsBytes": ledger.get("activationsBytes", 0),
        "graphsBytes": ledger.get("graphsBytes", 0),
        "kvCacheBytes": ledger.get("kvCacheBytes", 0),
    } | tokens


def measured_memory(observation: Observation) -> Manifest:
    """Return what a pod of the wanted revision measured; empty where none did."""
    known: Manifest = (observation.previous.get("memory") or {}).get("measured") or {}
    rollout = observation.previous.get("rollout") or {}
    if known and rollout.get("updateRevision") == observation.revision.name:
        return known
    if observation.answer is None or observation.answer.measured is None or observation.is_rolled_back:
        return {}
    return dict(observation.answer.measured.memory)
