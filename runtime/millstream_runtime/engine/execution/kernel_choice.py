"""Choose once, when the engine starts, which parts of a model Triton kernels compute.

A kernel is used where it takes the model's numbers and shapes, and where it was measured on the kind of GPU: a kernel
that compiles may still be slower than torch. Everything else is torch, with the reason.
"""

from __future__ import annotations

import torch

from millstream_runtime.config import KVCacheDType
from millstream_runtime.engine.kernel_backends import Backend, KernelChoice
from millstream_runtime.models.config.model_config import ModelConfig

PARTS = ("attention", "static_decode")
LEAST_CAPABILITY = 80
# Compute capabilities on which the kernels of `millstream_kernels` were measured against torch (docs/kernels.md).
MEASURED_CAPABILITIES: frozenset[int] = frozenset()


def choose_kernels(
    shape: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    stored: KVCacheDType,
    block_size_tokens: int,
    asked: Backend | None = None,
) -> tuple[KernelChoice, ...]:
    """Return one choice per part.

    Args:
        shape: of one rank.
        stored: how keys and values are stored.
        asked: overrides what the device says, not what the kernels can compute.
    """
    reason = _reason_for_torch(device) if asked is None else None
    if asked is Backend.TORCH:
        reason = "it was asked for"
    if reason is None and device.type == "cuda" and dtype is torch.float32:
        reason = "float32 has no matrix instruction on a GPU"
    if reason is None:
        reason = _unsupported(shape, dtype, stored, block_size_tokens)
    if reason is None:
        return tuple(KernelChoice(part, Backend.TRITON, "the kernels take this model") for part in PARTS)
    return tuple(KernelChoice(part, Backend.TORCH, reason) for part in PARTS)


def backend_of(part: str, choices: tuple[KernelChoice, ...]) -> Backend:
    """The backend of one of PARTS; torch where nothing was chosen."""
    return next((choice.backend for choice in choices if choice.part == part), Backend.TORCH)


def _reason_for_torch(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "kernels run on GPUs, and this engine computes on a CPU"
    major, minor = torch.cuda.get_device_capability(device)
    capability = 10 * major + minor
    if capability < LEAST_CAPABILITY:
        return f"the GPU is sm_{capability}; kernels need sm_{LEAST_CAPABILITY}"
    if capability not in MEASURED_CAPABILITIES:
        return f"no kernel was measured on sm_{capability} yet"
    return None


def _unsupported(shape: ModelConfig, dtype: torch.dtype, stored: KVCacheDType, block_size_tokens: int) -> str | None:
    pool_heads, head_dim = shape.kv_shape
    if stored is not KVCacheDType.AUTO:
        return f"keys and values are stored as {stored.value}"
    if pool_heads % 2:
        return "heads share a latent key (MLA)"
    if block_size_tokens & (block_size_tokens - 1):
        return f"blocks of {block_size_tokens} tokens: a power of two is supported"
    try:
        from millstream_kernels.attention.specification import unsupported
    except ImportError:
        return "triton is not installed"
    return unsupported(dtype, head_dim, shape.num_heads, pool_heads // 2)
