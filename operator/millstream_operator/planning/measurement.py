"""What was predicted and what was measured for one pinned plan, part by part. Pure.

The prediction is made anew and without corrections: from the shape, and from the engine limits of the plan that ran.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millstream_operator.catalog.gpu import GpuPart
from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.planning.sizing.memory_ledger import MemoryLedger, activations_bytes, gpu_ledger
from millstream_operator.planning.sizing.weights import rank_weights, weight_format

Plan = Mapping[str, Any]  # a `status.plan`
# From this share on, the KV cache is as large as all requests together can fill, not as large as the GPU allows.
FULL_POOL_PERCENT = 98


@dataclass(frozen=True, slots=True)
class Measurement:
    """Bytes by part (`calibration.PARTS`). A part that was not measured is absent in `measured`."""

    predicted: Mapping[str, int]
    measured: Mapping[str, int]


def is_measurable(plan: Plan) -> bool:
    """Whether the runtime's numbers are about what the formulas predict: one stage, no draft, a GPU that is known."""
    speculation = (plan.get("speculation") or {}).get("method", "Disabled")
    return (
        bool(plan.get("memory"))
        and (plan.get("gpusPerReplica") or 0) > 0
        and plan.get("pipelineParallelSize", 1) == 1
        and speculation == "Disabled"
        and (plan.get("engine") or {}).get("gpuMemoryUtilizationPercent") is not None
    )


def measurement(plan: Plan, shape: ModelShape, part: GpuPart, measured: Mapping[str, int]) -> Measurement:
    """Compare for a plan that `is_measurable`. `measured`: `status.memory.measured`."""
    ledger = _ledger(plan, shape, part)
    return Measurement(parts_of(ledger), _measured_parts(plan, ledger, measured))


def parts_of(ledger: MemoryLedger) -> dict[str, int]:
    """Return the predicted bytes of a ledger by part."""
    return {
        "weights": ledger.weights_bytes + ledger.embeddings_bytes + ledger.draft_weights_bytes,
        "activations": ledger.activations_bytes,
        "graphs": ledger.graphs_bytes,
        "other": ledger.context_bytes + ledger.nccl_bytes,
    }


def _ledger(plan: Plan, shape: ModelShape, part: GpuPart) -> MemoryLedger:
    tensor, engine = plan["tensorParallelSize"], plan["engine"]
    stored = weight_format(shape, plan["quantization"])
    activations = activations_bytes(
        shape,
        stored,
        tensor=tensor,
        max_num_batched_tokens=engine["maxNumBatchedTokens"],
        max_num_seqs=engine["maxNumSeqs"],
    )
    weights = rank_weights(shape, stored, tensor)
    return gpu_ledger(part, engine["gpuMemoryUtilizationPercent"], shape, weights, activations, ranks=tensor)


def _measured_parts(plan: Plan, ledger: MemoryLedger, measured: Mapping[str, int]) -> dict[str, int]:
    fields = {"weights": "weightsBytes", "activations": "activationsBytes", "graphs": "graphsBytes"}
    found = {name: measured[field] for name, field in fields.items() if field in measured}
    if len(found) == len(fields) and measured.get("kvCacheBytes") and not _fills_its_pool(plan, measured):
        used = sum(found.values()) + measured["kvCacheBytes"]
        found["other"] = ledger.usable_bytes - ledger.headroom_bytes - used
    return found


def _fills_its_pool(plan: Plan, measured: Mapping[str, int]) -> bool:
    """Whether the KV cache was limited by the number of requests, so that it says nothing of the memory left."""
    engine = plan["engine"]
    length, tokens = engine.get("maxModelLen"), measured.get("kvCacheTokens")
    return length is None or tokens is None or tokens * 100 >= length * engine["maxNumSeqs"] * FULL_POOL_PERCENT
