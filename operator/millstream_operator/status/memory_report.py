"""`status.memory`: what the plan predicted for one GPU, and what the runtime measured on it. Pure.

The measurement is taken once per revision, from the pod that answered: other pods of the same revision differ by some
kilobytes, which must not cause a write.
"""

from __future__ import annotations

from typing import Any

from millstream_operator.planning.calibration import NO_CORRECTION, absurd, of_plan
from millstream_operator.planning.measurement import is_measurable
from millstream_operator.probing.boot_report import MEMORY_KEYS
from millstream_operator.status.observation import Observation

Manifest = dict[str, Any]
_NAMES = {key: key.split("_")[0] + "".join(part.title() for part in key.split("_")[1:]) for key in MEMORY_KEYS}
_NAMES["kv_cache_bytes"], _NAMES["kv_cache_tokens"] = "kvCacheBytes", "kvCacheTokens"


def memory_status(observation: Observation) -> Manifest | None:
    """The field as it is written; None where neither side is known."""
    plan = observation.revision.plan
    predicted, measured = _predicted(plan), _measured(observation)
    found = {"predicted": predicted, "measured": measured, "correction": _correction(plan)}
    ignored = _ignored(plan, predicted, measured)
    sides: Manifest = {side: numbers for side, numbers in found.items() if numbers}
    return sides | ({"ignored": ignored} if ignored else {}) or None


def _correction(plan: Manifest) -> Manifest:
    """Return what the plan's own placement was corrected by."""
    if not plan.get("calibration"):
        return {}
    found = of_plan(plan).correction(plan["accelerator"], plan["quantization"], plan["tensorParallelSize"])
    return found.as_dict() if found != NO_CORRECTION else {}


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


def _measured(observation: Observation) -> Manifest:
    known: Manifest = (observation.previous.get("memory") or {}).get("measured") or {}
    rollout = observation.previous.get("rollout") or {}
    if known and rollout.get("updateRevision") == observation.revision.name:
        return known
    reports = [observation.reports[uid].boot for uid in sorted(observation.reports)]
    if observation.answer is not None and observation.answer.boot is not None and not observation.is_rolled_back:
        reports.insert(0, observation.answer.boot)
    return next(({_NAMES[key]: value for key, value in boot.memory.items()} for boot in reports if boot.memory), {})
