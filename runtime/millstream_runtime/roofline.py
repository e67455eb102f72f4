"""Bytes, FLOPs and launches of a model's step: what hardware can do at best. One arithmetic for all who ask.

    Work (bytes, FLOPs, launches) --rates of a device--> max(bytes / rate, FLOPs / rate) + launches * seconds each

The planner predicts with it, benchmarks report shares of it. It imports nothing
but the standard library. What is counted crosses the memory of one device: weights once per step, the cache of a token
once per step that reads it.

    linear       2 · M · N · K FLOPs; its weights
    attention    4 · H · D FLOPs per query and token that it sees; the keys and values of what is seen
    experts      those that a token of the step is routed to; one is missed with (1 - k / E) ** tokens

Williams et al. 2009 (doi 10.1145/1498765.1498785) for the model; Pope et al. 2022 (arXiv 2211.05102) for a step.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """What one kernel, or one step, does on one device."""

    num_bytes: float = 0.0  # read and written
    flops: float = 0.0
    launches: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.num_bytes + other.num_bytes, self.flops + other.flops, self.launches + other.launches)


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device does per second, and what a launch costs: peaks, or what is reached of them."""

    bytes_per_second: float
    flops_per_second: float
    launch_seconds: float = 0.0

    def seconds(self, work: Work) -> float:
        """The time of `work`: bytes and FLOPs overlap, launches do not."""
        busy = max(work.flops / self.flops_per_second, work.num_bytes / self.bytes_per_second)
        return busy + work.launches * self.launch_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """One device's view of a model. `ranks` share the FLOPs; bytes are those of one rank."""

    active_parameters: int  # that one token multiplies with, on all ranks
    num_layers: int
    num_heads: int
    head_dim: int
    read_bytes: int  # weights that a step reads when every expert is used: layers and head
    experts_bytes: int = 0  # of them, of routed experts
    num_experts: int = 0
    num_experts_per_token: int = 0
    kv_bytes_per_token: int = 0
    ranks: int = 1
    launches: int = 0  # of a step


def step_work(sizes: ModelSizes, new_tokens: int, context_tokens: int) -> Work:
    """One forward pass: `new_tokens` are computed in all, `context_tokens` of the cache are read in all."""
    flops = (linear_flops(sizes.active_parameters, new_tokens) + attention_flops(sizes, context_tokens)) / sizes.ranks
    num_bytes = weight_bytes_read(sizes, new_tokens) + context_tokens * sizes.kv_bytes_per_token
    return Work(num_bytes, flops, sizes.launches)


def linear_flops(parameters: int, tokens: int) -> int:
    """Of `tokens` rows by weights of `parameters` numbers."""
    return 2 * parameters * tokens


def attention_flops(sizes: ModelSizes, pairs: int) -> int:
    """Scores and values of `pairs` of a query and a token that it sees, in all layers, on all ranks."""
    return 4 * sizes.num_layers * sizes.num_heads * sizes.head_dim * pairs


def weight_bytes_read(sizes: ModelSizes, new_tokens: int) -> float:
    """All weights but the experts that no token of the step is routed to."""
    if not sizes.num_experts:
        return sizes.read_bytes
    missed = (1 - sizes.num_experts_per_token / sizes.num_experts) ** new_tokens
    return sizes.read_bytes - sizes.experts_bytes * missed
