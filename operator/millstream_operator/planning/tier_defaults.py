"""Defaults by tier and workload: batching limits, memory share, usual lengths. A table, so that docs can print it.

A profile knows more about requests than a tier does, so what it says wins. Interactive profiles keep steps short:
large batches raise throughput and inflate p95 latency.
"""

from __future__ import annotations

from dataclasses import dataclass

from millstream_operator.api.workload import Profile, Tier

DEFAULT_MAX_MODEL_LEN = 8192


@dataclass(frozen=True, slots=True)
class BatchDefaults:
    """Engine limits, and who says so."""

    max_num_batched_tokens: int
    max_num_seqs: int
    gpu_memory_utilization_percent: int
    source: str


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a usual request, and of the longest one that a default should admit."""

    input_tokens: int
    output_tokens: int
    max_model_len: int = DEFAULT_MAX_MODEL_LEN


NEITHER = BatchDefaults(2048, 64, 90, "no tier or profile is given")
BY_TIER: dict[Tier, BatchDefaults] = {
    Tier.STARTUP: BatchDefaults(8192, 128, 90, "tier Startup"),
    Tier.MID: BatchDefaults(32768, 256, 90, "tier Mid"),
    Tier.ENTERPRISE: BatchDefaults(32768, 256, 90, "tier Enterprise"),
}
BY_PROFILE: dict[Profile, BatchDefaults] = {
    Profile.CHAT: BatchDefaults(8192, 128, 85, "profile Chat"),
    Profile.RAG: BatchDefaults(16384, 128, 90, "profile RAG"),
    Profile.CODE: BatchDefaults(8192, 128, 90, "profile Code"),
    Profile.MATH: BatchDefaults(8192, 128, 90, "profile Math"),
    Profile.CREATIVE: BatchDefaults(8192, 128, 90, "profile Creative"),
    Profile.BATCH: BatchDefaults(32768, 512, 95, "profile Batch"),
    Profile.EDGE: BatchDefaults(2048, 16, 85, "profile Edge"),
}
ANY_REQUEST = Lengths(1000, 250)
LENGTHS: dict[Profile, Lengths] = {
    Profile.CHAT: Lengths(1000, 300),
    Profile.RAG: Lengths(4000, 400, 16384),
    Profile.CODE: Lengths(2000, 400, 16384),
    Profile.MATH: Lengths(500, 1000),
    Profile.CREATIVE: Lengths(500, 1000),
    Profile.BATCH: Lengths(1500, 250),
    Profile.EDGE: Lengths(500, 200, 4096),
}


def batch_defaults(tier: Tier | None, profile: Profile | None) -> BatchDefaults:
    """The profile's, else the tier's, else small ones."""
    if profile is not None:
        return BY_PROFILE[profile]
    return BY_TIER[tier] if tier is not None else NEITHER


def usual_lengths(profile: Profile | None) -> Lengths:
    return LENGTHS[profile] if profile is not None else ANY_REQUEST
