"""What was predicted and what was measured for one pinned plan, part by part. Pure.

The prediction is made anew and without corrections: from the shape, and from the engine limits of the plan that ran.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millstream_operator.catalog.gpu import GpuPart
from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.planning.sizing.kv_pool import kv_pool
from millstream_operator.planning.sizing.memory_ledger import (
    MemoryLedger,
    activations_bytes,
    gpu_ledger,
    kv_bytes_per_token,
)
from millstream_operator.planning.sizing.roofline import Machine, prefill_seconds, step_seconds
from millstream_operator.planning.sizing.weights import rank_weights, weight_format

Plan = Mapping[str, Any]  # a `status.plan`
MAX_BATCH_SEQUENCES = 1 << 20  # of a measured step; a larger number is no measurement
# From this share on, the KV cache is as large as all requests together can fill, not as large as the GPU allows.
FULL_POOL_PERCENT = 98


@dataclass(frozen=True, slots=True)
class StepSample:
    """A step that a runtime timed: `new_tokens` computed and `context_tokens` read, of all `sequences` together."""

    sequences: int
    new_tokens: int
    context_tokens: int
    microseconds: int

    @property
    def step(self) -> str:
        """Which of `calibration.STEPS` it is."""
        if self.new_tokens > self.sequences:
            return "prefill"
        return "decode" if self.sequences == 1 else "batch"


@dataclass(frozen=True, slots=True)
class PodMeasurement:
    """What one pod measured. `memory` as in `status.memory.measured`; `at_seconds`: when the pod was created."""

    pod: str
    at_seconds: int
    memory: Mapping[str, int]
    steps: tuple[StepSample, ...] = ()


@dataclass(frozen=True, slots=True)
class Measurement:
    """Bytes by part (`calibration.PARTS`) and microseconds by step (`STEPS`). What was not measured is absent in
    `measured`. `batch_sequences`: requests of the step `batch`."""

    predicted: Mapping[str, int]
    measured: Mapping[str, int]
    batch_sequences: int = 1


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


def measurement(plan: Plan, shape: ModelShape, part: GpuPart, measured: PodMeasurement) -> Measurement:
    """Compare for a plan that `is_measurable`."""
    ledger = _ledger(plan, shape, part)
    steps = {sample.step: sample for sample in measured.steps}
    machine = _machine(plan, shape, part)
    return Measurement(
        parts_of(ledger) | {name: _predicted_microseconds(machine, sample) for name, sample in steps.items()},
        _measured_parts(plan, shape, ledger, measured.memory)
        | {name: sample.microseconds for name, sample in steps.items()},
        steps["batch"].sequences if "batch" in steps else 1,
    )


def _machine(plan: Plan, shape: ModelShape, part: GpuPart) -> Machine:
    """The GPUs of one replica as the roofline sees them, without corrections."""
    tensor, method = plan["tensorParallelSize"], plan["quantization"]
    return Machine(
        part=part,
        shape=shape,
        weights=rank_weights(shape, weight_format(shape, method), tensor),
        method=method,
        tensor=tensor,
        pipeline=1,
        kv_bytes=kv_bytes_per_token(shape, plan.get("kvCache") or "None", tensor),
        over_nvlink=part.has_nvlink and tensor <= part.nvlink_island_size,
    )


def _predicted_microseconds(machine: Machine, sample: StepSample) -> int:
    if sample.step == "prefill":
        seconds = prefill_seconds(machine, sample.new_tokens, sample.new_tokens)
    else:
        seconds = step_seconds(machine, sample.new_tokens, sample.context_tokens)
    return max(1, round(seconds * 1_000_000))


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
        kv_cache=plan.get("kvCache") or "None",
        max_model_len=engine.get("maxModelLen") or 0,
    )
    weights = rank_weights(shape, stored, tensor)
    return gpu_ledger(part, engine["gpuMemoryUtilizationPercent"], shape, weights, activations, ranks=tensor)


def _measured_parts(plan: Plan, shape: ModelShape, ledger: MemoryLedger, measured: Mapping[str, int]) -> dict[str, int]:
    fields = {"weights": "weightsBytes", "activations": "activationsBytes", "graphs": "graphsBytes"}
    found = {name: measured[field] for name, field in fields.items() if field in measured}
    if len(found) == len(fields) and measured.get("kvCacheBytes") and not _fills_its_pool(plan, shape, measured):
        used = sum(found.values()) + measured["kvCacheBytes"]
        found["other"] = ledger.usable_bytes - ledger.headroom_bytes - used
    return found


def _fills_its_pool(plan: Plan, shape: ModelShape, measured: Mapping[str, int]) -> bool:
    """Whether the KV cache was limited by the number of requests or blocks, so that it says nothing of the memory."""
    engine = plan["engine"]
    length, tokens = engine.get("maxModelLen"), measured.get("kvCacheTokens")
    if length is None or tokens is None:
        return True
    largest_bytes = kv_pool(
        shape,
        kv_bytes_per_token(shape, plan.get("kvCache") or "None", plan["tensorParallelSize"]),
        max_model_len=length,
        max_num_batched_tokens=engine["maxNumBatchedTokens"],
        max_num_seqs=engine["maxNumSeqs"],
        is_grouped=engine.get("hybridKvCacheManager") == "Enabled",
    ).largest_bytes
    if largest_bytes is not None:
        return measured["kvCacheBytes"] * 100 >= largest_bytes * FULL_POOL_PERCENT
    most_tokens: int = length * engine["maxNumSeqs"]
    return tokens * 100 >= most_tokens * FULL_POOL_PERCENT
