"""Predicted latency and throughput: the larger of arithmetic and memory traffic, and the links between GPUs.

    step = max(FLOPs / (peak × share), bytes / (bandwidth × share)) + all-reduces + overhead

FLOPs and bytes are those of `millstream_runtime.roofline`, the shares those of `catalog/efficiencies.yaml`: what good
engines reach, until a GPU measured them. Where step times were measured, `Machine.correction` multiplies the result.
All-reduce is a ring, twice a layer: 2 (t-1)/t of the stream over each link (arXiv 1909.08053). Expected tokens of a
speculative step: (1 - a^(k+1)) / (1 - a) (arXiv 2211.17192).
"""

from __future__ import annotations

from dataclasses import dataclass

from millstream_operator.catalog.efficiencies import Efficiency, efficiencies
from millstream_operator.catalog.gpu import GpuPart
from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.planning.calibration import NO_CORRECTION, Correction
from millstream_operator.planning.sizing.weights import RankWeights
from millstream_runtime.roofline import ModelSizes, Rates, attention_flops, step_work

NVLINK_LATENCY_SECONDS, PCIE_LATENCY_SECONDS = 8e-6, 25e-6
_METHOD_DTYPE = {"FP8": "fp8", "INT8": "int8"}  # others multiply in the dtype of the model


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One model on the GPUs of one replica. `kv_bytes` counts one token on one rank."""

    part: GpuPart
    shape: ModelShape
    weights: RankWeights
    method: str
    tensor: int
    pipeline: int
    kv_bytes: int
    over_nvlink: bool
    correction: Correction = NO_CORRECTION  # of the steps' times, by measurements


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSpeed:
    """The draft as predictions see it. `draft` None: drafts cost nothing (n-grams)."""

    draft_tokens: int
    acceptance: float
    draft: Machine | None = None

    @property
    def tokens_per_step(self) -> float:
        """Tokens that one verified step yields on average, the bonus token included."""
        return sum(self.acceptance**position for position in range(self.draft_tokens + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Of one replica. Latencies are those of a usual request without queueing."""

    kv_cache_tokens: int
    concurrent_sequences: int  # of usual length, at the same time
    ttft_milliseconds: int
    itl_microseconds: int  # with `concurrent_sequences` running
    single_stream_tokens_per_second: int
    tokens_per_second: int
    requests_per_minute: int

    def as_dict(self) -> dict[str, int]:
        return {
            "kvCacheTokens": self.kv_cache_tokens,
            "concurrentSequences": self.concurrent_sequences,
            "ttftMilliseconds": self.ttft_milliseconds,
            "itlMicroseconds": self.itl_microseconds,
            "singleStreamTokensPerSecond": self.single_stream_tokens_per_second,
            "tokensPerSecond": self.tokens_per_second,
            "requestsPerMinute": self.requests_per_minute,
        }


def step_seconds(machine: Machine, new_tokens: int, context_tokens: int) -> float:
    """One forward pass: `new_tokens` computed in all, `context_tokens` of KV cache read in all. Not corrected."""
    dtype = _METHOD_DTYPE.get(machine.method, _model_dtype(machine.shape))
    work = step_work(_sizes(machine), new_tokens, context_tokens)
    stage = _rates(machine, dtype).seconds(work) + _all_reduce_seconds(machine, new_tokens)
    return stage * machine.pipeline + _efficiency(machine).step_overhead_seconds


def prefill_seconds(machine: Machine, tokens: int, max_num_batched_tokens: int) -> float:
    """A prompt alone, in chunks of `max_num_batched_tokens`; a chunk reads the keys of those before it."""
    total, done = 0.0, 0
    while done < tokens:
        chunk = min(tokens - done, max_num_batched_tokens)
        # Causal: a query of the chunk sees what was before and on average half of the chunk; the cache is read once.
        flops_context = chunk * (done + chunk // 2)
        total += step_seconds(machine, chunk, done) + _attention_seconds(machine, flops_context)
        done += chunk
    return total * machine.correction.prefill_factor


def chunk_seconds(machine: Machine, new_tokens: int) -> float:
    """Return the time of a step with a chunk of a prompt in it."""
    return step_seconds(machine, new_tokens, 0) * machine.correction.prefill_factor


def decode_seconds(
    machine: Machine, sequences: int, context_tokens: int, speculation: SpeculationSpeed | None
) -> float:
    """Time between two tokens of one sequence, with `sequences` running and `context_tokens` cached for each."""
    cached = sequences * context_tokens
    if speculation is None:
        return _decode_step_seconds(machine, sequences, sequences, cached)
    step = _decode_step_seconds(machine, sequences, sequences * (speculation.draft_tokens + 1), cached)
    if speculation.draft is not None:
        step += speculation.draft_tokens * step_seconds(speculation.draft, sequences, cached)
    return step / speculation.tokens_per_step


def _decode_step_seconds(machine: Machine, sequences: int, new_tokens: int, cached: int) -> float:
    """One step, corrected. Steps were timed with an almost empty cache, so reading the cache stays as predicted."""
    correction = machine.correction.decode_factor(sequences) - 1.0
    return step_seconds(machine, new_tokens, cached) + step_seconds(machine, new_tokens, 0) * correction


def predict(
    machine: Machine,
    *,
    kv_cache_tokens: int,
    kv_cache_requests: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    input_tokens: int,
    output_tokens: int,
    speculation: SpeculationSpeed | None,
) -> Prediction:
    """Latencies and capacity for requests of a usual length, of which the KV cache holds `kv_cache_requests`."""
    sequences = max(1, min(max_num_seqs, kv_cache_requests))
    context = input_tokens + output_tokens // 2
    prefill = prefill_seconds(machine, input_tokens, max_num_batched_tokens)
    alone = decode_seconds(machine, 1, context, speculation)
    # Drafts that a full batch has no idle arithmetic to check are left out there.
    together = min(decode_seconds(machine, sequences, context, tries) for tries in (None, speculation))
    # One request takes its prefill from all others, and an equal share of the decoding steps.
    request = prefill + output_tokens * together / sequences
    return Prediction(
        kv_cache_tokens=kv_cache_tokens,
        concurrent_sequences=sequences,
        ttft_milliseconds=max(1, round(prefill * 1000)),
        itl_microseconds=max(1, round(together * 1_000_000)),
        single_stream_tokens_per_second=max(1, round(1 / alone)),
        tokens_per_second=max(1, round(output_tokens / request)),
        requests_per_minute=max(1, round(60 / request)),
    )


def _attention_seconds(machine: Machine, pairs: int) -> float:
    """Return the seconds for scores and values of `pairs` query-key pairs, beyond those of `step_seconds`."""
    flops = attention_flops(_sizes(machine), pairs) / (machine.tensor * machine.pipeline)
    return flops / _rates(machine, _model_dtype(machine.shape)).flops_per_second


def _sizes(machine: Machine) -> ModelSizes:
    shape, weights = machine.shape, machine.weights
    return ModelSizes(
        active_parameters=shape.active_parameters,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        head_dim=shape.head_size,
        read_bytes=weights.linear_bytes + weights.head_bytes,
        experts_bytes=weights.experts_bytes,
        num_experts=shape.num_experts,
        num_experts_per_token=shape.num_experts_per_token,
        kv_bytes_per_token=machine.kv_bytes,
        ranks=machine.tensor * machine.pipeline,
    )


def _rates(machine: Machine, dtype: str) -> Rates:
    part, share = machine.part, _efficiency(machine)
    return Rates(part.memory_bandwidth_bytes_per_second * share.bandwidth, part.dtype_flops(dtype) * share.compute)


def _efficiency(machine: Machine) -> Efficiency:
    return efficiencies().of(machine.part.name)


def _model_dtype(shape: ModelShape) -> str:
    """The dtype of activations: what attention, and weights that are kept or unpacked in it, are computed in."""
    return "fp32" if shape.dtype == "FP32" else "bf16"


def _all_reduce_seconds(machine: Machine, new_tokens: int) -> float:
    """Return the seconds of the all-reduces of one stage: two per layer."""
    ranks, part, shape = machine.tensor, machine.part, machine.shape
    if ranks == 1:
        return 0.0
    link = part.nvlink_bytes_per_second if machine.over_nvlink else None
    latency = NVLINK_LATENCY_SECONDS if link else PCIE_LATENCY_SECONDS
    volume = 2 * (ranks - 1) / ranks * new_tokens * shape.hidden_size * shape.compute_bytes
    one = latency + volume / ((link or part.pcie_bytes_per_second) * _efficiency(machine).link)
    return 2 * shape.num_layers / machine.pipeline * one
