"""Choose once, when the engine starts, which parts of a model kernels compute: Triton's, or compiled ones on a CPU.

A Triton kernel is used where it takes the model's numbers and shapes, and where it was measured on the kind of GPU: a
kernel that compiles may still be slower than torch. Products by quantized weights need no measurement: torch would
dequantize the weight each time. Their results are compared with the weights' when these are loaded (`kernel_check`).
Everything else is torch, with the reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from millstream_runtime.config import KVCacheDType
from millstream_runtime.engine.attention import compiled_decodes, compiled_prompts
from millstream_runtime.engine.kernel_backends import Backend, KernelChoice
from millstream_runtime.engine.sampling.sampler import SamplerKernels
from millstream_runtime.models.arithmetic import Arithmetic
from millstream_runtime.models.config.model_config import ModelConfig
from millstream_runtime.models.loading.layer_kernels import LayerKernels

if TYPE_CHECKING:
    from millstream_kernels.cpu.loaded_code import LoadedCode

DECODES, PROMPTS = "decode_attention", "prompt_attention"  # on a CPU
COMPILED_ATTENTION = (DECODES, PROMPTS)
ATTENTION_PARTS = ("attention", "static_decode")
LINEAR = "linear"  # of quantized weights
DENSE_LINEAR = "dense_linear"  # of weights of 16 bits: steps of few rows
NORM, ACTIVATION = "norm", "activation"
LAYER_PARTS = (
    NORM,
    ACTIVATION,
    LINEAR,
    DENSE_LINEAR,
)  # taken layer by layer: what a kernel does not take is torch's
ROPE, EXPERTS, SAMPLER = "rope_kv_write", "experts", "sampler"
PARTS_OF_LAYERS = (*LAYER_PARTS, ROPE, EXPERTS)  # the parts that weights are laid out for
PARTS = (*ATTENTION_PARTS, ROPE, *LAYER_PARTS, EXPERTS, SAMPLER)
LATENT = "heads share a latent key (MLA)"
KERNEL_POOLS = {torch.float32, torch.bfloat16, torch.float16}  # that the compiled kernel writes
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
    reason = _reason_for_torch(device, dtype, asked)
    unmeasured = None if reason or asked else _unmeasured(device)
    of_layers = reason or unmeasured or _unsupported_layers(dtype)
    of_attention = of_layers or _unsupported(shape, dtype, stored, block_size_tokens)
    reasons: dict[str, str | None] = dict.fromkeys(PARTS, of_layers)
    reasons |= dict.fromkeys(ATTENTION_PARTS, of_attention)
    if shape.quantization is not None:
        reasons[LINEAR] = reason or _unsupported_layers(dtype)
    reasons[ROPE] = of_layers or _unsupported_heads(shape)
    if shape.has_experts:
        reasons[EXPERTS] = of_layers or (None if shape.quantization is None else "experts are quantized")
    else:
        del reasons[EXPERTS]  # the model has none
    return tuple(
        KernelChoice(part, Backend.TRITON, "the kernels take this model")
        if why is None
        else KernelChoice(part, Backend.TORCH, why)
        for part, why in reasons.items()
    )


def choose_compiled(
    shape: ModelConfig, numbers: Arithmetic | torch.dtype, stored: KVCacheDType, problem: str | None
) -> tuple[KernelChoice, ...]:
    """What computes decodes, prompts, norms, gates and rotations on a CPU.

    Args:
        shape: of one rank.
        numbers: of the model; a type is that of all.
        problem: why the compiled kernels cannot be used at all.
    """
    arithmetic = Arithmetic.of(numbers)
    dtype = arithmetic.dtype
    other_type = None if dtype is torch.float32 else f"dtype {str(dtype).removeprefix('torch.')}"
    layers = problem or other_type
    reasons = {
        DECODES: problem or compiled_decodes.unsupported(dtype),
        PROMPTS: problem or compiled_prompts.unsupported(dtype),
        ROPE: layers or (LATENT if shape.kv_shape[0] % 2 else _not_written(stored, arithmetic.kv_cache)),
        NORM: layers,
        ACTIVATION: layers,
    }
    return tuple(
        KernelChoice(part, Backend.NUMBA, "the kernel takes this model")
        if why is None
        else KernelChoice(part, Backend.TORCH, why)
        for part, why in reasons.items()
    )


def compiled_layers(choices: tuple[KernelChoice, ...], code: LoadedCode | None) -> LayerKernels | None:
    """What makes the layers of a model on a CPU, of a draft model or a head too; None: torch."""
    if code is None or backend_of(NORM, choices) is not Backend.NUMBA:
        return None
    from millstream_runtime.models.layers.compiled_layers import CompiledLayers

    return CompiledLayers(code, rotates=backend_of(ROPE, choices) is Backend.NUMBA)


def layer_kernels(choices: tuple[KernelChoice, ...], device: torch.device, dtype: torch.dtype) -> LayerKernels | None:
    """What makes a model's layers; None: torch. Imports triton only where it was chosen."""
    chosen = [backend_of(part, choices) is Backend.TRITON for part in PARTS_OF_LAYERS]
    if not any(chosen):
        return None
    from millstream_runtime.models.layers.triton_layers import TritonLayers
    from millstream_runtime.quantization.gpu.kernel_check import KernelCheck

    norm, activation, linear, dense, rope, experts = chosen
    check = KernelCheck(dtype) if device.type == "cuda" else None
    return TritonLayers(norm, activation, linear, rope, experts, dense, check)


def after_loading(
    choices: tuple[KernelChoice, ...], layers: LayerKernels | None, *, waits_for_device: bool = False
) -> tuple[KernelChoice, ...]:
    """The choices, corrected by what the weights showed when they were loaded.

    `waits_for_device`: see `Decoder`; experts that no kernel took do.
    """
    refused: dict[str, KernelChoice] = {}
    if layers is not None and layers.linear_problem is not None:
        refused[LINEAR] = KernelChoice(LINEAR, Backend.TORCH, layers.linear_problem)
    if waits_for_device and backend_of(EXPERTS, choices) is Backend.TRITON:
        refused[EXPERTS] = KernelChoice(EXPERTS, Backend.TORCH, "the kernels do not take the experts of a layer")
    return tuple(refused.get(choice.part, choice) for choice in choices)


def sampler_kernels(choices: tuple[KernelChoice, ...]) -> SamplerKernels | None:
    """What draws tokens from logits and describes them; None: torch."""
    if backend_of(SAMPLER, choices) is Backend.TORCH:
        return None
    from millstream_runtime.engine.sampling.triton_sampler import choose_tokens, describe_rows

    return SamplerKernels(choose_tokens, describe_rows)


def backend_of(part: str, choices: tuple[KernelChoice, ...]) -> Backend:
    """The backend of one of PARTS; torch where nothing was chosen."""
    return next((choice.backend for choice in choices if choice.part == part), Backend.TORCH)


def _reason_for_torch(device: torch.device, dtype: torch.dtype, asked: Backend | None) -> str | None:
    if asked is Backend.TORCH:
        return "it was asked for"
    if device.type == "cuda" and dtype is torch.float32:
        return "float32 has no matrix instruction on a GPU"
    if asked is not None:
        return None
    if device.type != "cuda":
        return "kernels run on GPUs, and this engine computes on a CPU"
    capability = _capability(device)
    return f"the GPU is sm_{capability}; kernels need sm_{LEAST_CAPABILITY}" if capability < LEAST_CAPABILITY else None


def _unmeasured(device: torch.device) -> str | None:
    capability = _capability(device)
    return None if capability in MEASURED_CAPABILITIES else f"no kernel was measured on sm_{capability} yet"


def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _unsupported_layers(dtype: torch.dtype) -> str | None:
    try:
        from millstream_kernels.elementwise.rms_norm import DTYPES
        from millstream_kernels.tuning.table import ARCHITECTURES, TuningTableError, table_of
    except ImportError:
        return "triton is not installed"
    try:
        for architecture in ARCHITECTURES:
            table_of(architecture)
    except TuningTableError as error:
        return str(error)
    return None if dtype in DTYPES else f"dtype {str(dtype).removeprefix('torch.')}"


def _unsupported_heads(shape: ModelConfig) -> str | None:
    if shape.kv_shape[0] % 2:
        return LATENT
    from millstream_kernels.elementwise.rope_kv_write import unsupported

    return unsupported(shape.head_dim)


def _unsupported(shape: ModelConfig, dtype: torch.dtype, stored: KVCacheDType, block_size_tokens: int) -> str | None:
    pool_heads, head_dim = shape.kv_shape
    if block_size_tokens & (block_size_tokens - 1):
        return f"blocks of {block_size_tokens} tokens: a power of two is supported"
    if pool_heads == 1:  # a latent, then the rotated part of a key
        if stored is not KVCacheDType.AUTO:
            return f"latents are stored as {stored.value}"
        from millstream_kernels.attention import mla

        return mla.unsupported(dtype, head_dim - shape.head_dim, shape.head_dim)
    from millstream_kernels.attention.specification import unsupported

    return unsupported(dtype, head_dim, shape.num_heads, pool_heads // 2)


def _not_written(stored: KVCacheDType, plain_dtype: torch.dtype) -> str | None:
    """Why the compiled kernel does not store keys and values so; None: it does."""
    if stored is not KVCacheDType.AUTO:
        return f"keys and values are stored as {stored.value}"
    is_written = plain_dtype in KERNEL_POOLS
    return None if is_written else f"keys and values are stored as {str(plain_dtype).removeprefix('torch.')}"
