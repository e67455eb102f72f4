"""Which code computes a part of the model: torch's own operations, or a kernel of ours. Readable without torch."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Backend(StrEnum):
    """The code that computes a part."""

    TORCH = "torch"
    TRITON = "triton"
    NUMBA = "numba"  # compiled for a CPU when the project was built


class KernelChoice(msgspec.Struct, frozen=True):
    """What was chosen for a part when the engine started, and why; `/ready` shows it."""

    # "decode_attention", "prompt_attention" on a CPU; "attention" of an eager step, "static_decode" of steps that a
    # CUDA graph replays, "rope_kv_write", "norm", "activation", "linear", of quantized weights, "dense_linear", of
    # weights of 16 bits, "experts", "sampler"
    part: str
    backend: Backend
    reason: str


class LinearChoice(msgspec.Struct, frozen=True):
    """How many quantized layers are computed by which arithmetic, and why; `/ready` shows it."""

    computed_by: str
    reason: str
    layers: int
    rounded_while_loading: bool = False  # from 16 or 32 bits in the checkpoint
