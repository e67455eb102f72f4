"""Norm, gate and rotation of a layer on a CPU: the typed functions of `elementwise`. All numbers are float32, but for
those of a KV pool, which may have 16 bits.

A call costs 4 to 6 us besides its work, so arguments are checked as far as attributes of tensors go: a type, a device,
a shape. Small tasks run on the thread that calls; results are the same with any number.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from millstream_kernels.arguments import KernelArgumentError
from millstream_kernels.cpu.loaded_code import LoadedCode
from millstream_kernels.cpu.task import ActivationKind, Format, GateField, NormField, RopeField, bits_of

# Of a task that a team of threads is worth: some 20 us of work on one, and a few to wake others.
LEAST_NUMBERS_OF_TEAM = 1 << 16

POOL_FORMATS = {
    torch.float32: Format.FLOAT32,
    torch.bfloat16: Format.BFLOAT16,
    torch.float16: Format.FLOAT16,
}

_NormTask, _GateTask = ctypes.c_int64 * len(NormField), ctypes.c_int64 * len(GateField)
_RopeTask = ctypes.c_int64 * len(RopeField)


def rms_norm(code: LoadedCode, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x ** 2) + eps) * weight` over the last dimension.

    Args:
        x: `[.., size]`.
        weight: `[size]`.

    Raises:
        KernelArgumentError: a tensor that is no float32 of a CPU, or another size; names the argument.
    """
    size, x = weight.shape[0], x.contiguous()
    _require_float32("x", x)
    _require_float32("weight", weight)
    if x.shape[-1] != size:
        raise KernelArgumentError("x", f"has rows of {x.shape[-1]} numbers, and the weight has {size}")
    out, numbers = torch.empty_like(x), x.numel()
    task = _NormTask(x.data_ptr(), weight.data_ptr(), out.data_ptr(), numbers // size, size, bits_of(eps))
    _run(code, "rms_norm", task, numbers)
    return out


def gated_activation(code: LoadedCode, x: Tensor, kind: ActivationKind) -> Tensor:
    """`x` `[T, 2 * size]`, gates, then ups, to `activation(gate) * up`, `[T, size]`.

    Raises:
        KernelArgumentError: no float32 of a CPU, or rows of an odd length.
    """
    x = x.contiguous()
    _require_float32("x", x)
    rows, width = x.shape
    if width % 2:
        raise KernelArgumentError("x", f"has rows of {width} numbers, which are not a gate and an up")
    out = x.new_empty(rows, width // 2)
    _run(code, "gated_activation", _GateTask(x.data_ptr(), out.data_ptr(), rows, width // 2, kind), x.numel())
    return out


def rope_kv_write(
    code: LoadedCode,
    qkv: Tensor,
    num_heads: int,
    angles: tuple[Tensor, Tensor],
    positions: Tensor,
    slots: Tensor,
    pool: Tensor,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Norm queries and keys where there is a weight, rotate them, and store keys and values in the pool.

    Args:
        qkv: `[T, H + 2 * KV, D]`: heads of queries, keys and values.
        angles: cosines and sines, each `[positions, pairs]`; number i of a head turns with number `pairs + i`.
        positions: int64 `[T]`, rows of the angles.
        slots: int64 `[T]`, places in the pool, all different.
        pool: `[2 * KV, slots, D]`, keys, then values: float32, bfloat16 or float16, rounded once.
        norm_weight: `[H + KV, D]`.

    Returns:
        The queries, `[T, H, D]`. Those of a token whose position or slot does not exist are NaN.

    Raises:
        KernelArgumentError: a type, a device or a shape that the kernel does not take; names the argument.
    """
    cos, sin = angles
    qkv = qkv.contiguous()
    tokens, all_heads, size = qkv.shape
    kv_heads, (num_angles, pairs), pool_shape = (all_heads - num_heads) // 2, cos.shape, pool.shape
    _require_float32("qkv", qkv)
    if pool.dtype not in POOL_FORMATS or not pool.is_cpu or not pool.is_contiguous():
        raise KernelArgumentError("pool", "is not float32, bfloat16 or float16, contiguous, in a CPU's memory")
    _require_float32("cosines", cos)
    _require_float32("sines", sin)
    _require_places("positions", positions, tokens)
    _require_places("slots", slots, tokens)
    if pool_shape[0] != 2 * kv_heads or pool_shape[2] != size:
        raise KernelArgumentError("pool", f"is {[*pool_shape]}, and qkv has {kv_heads} heads of {size} for each half")
    if sin.shape != cos.shape or 2 * pairs > size:
        raise KernelArgumentError("angles", f"are {[*cos.shape]} and {[*sin.shape]}, of heads of {size}")
    weight_address = 0
    if norm_weight is not None:
        _require_float32("norm_weight", norm_weight)
        if norm_weight.shape != (num_heads + kv_heads, size):
            raise KernelArgumentError("norm_weight", f"is {[*norm_weight.shape]}, of {num_heads + kv_heads} x {size}")
        weight_address = norm_weight.data_ptr()
    queries = qkv.new_empty(tokens, num_heads, size)
    task = _RopeTask(
        qkv.data_ptr(),
        queries.data_ptr(),
        pool.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        positions.data_ptr(),
        slots.data_ptr(),
        weight_address,
        tokens,
        num_heads,
        kv_heads,
        size,
        pairs,
        pool_shape[1],
        num_angles,
        bits_of(eps),
        POOL_FORMATS[pool.dtype],
    )
    _run(code, "rope_kv_write", task, qkv.numel())
    return queries


def _run(code: LoadedCode, kernel: str, task: ctypes.Array[ctypes.c_int64], numbers: int) -> None:
    threads = torch.get_num_threads() if numbers >= LEAST_NUMBERS_OF_TEAM else 1
    code.run(kernel, ctypes.addressof(task), threads)


def _require_float32(name: str, tensor: Tensor) -> None:
    if tensor.dtype is not torch.float32 or not tensor.is_cpu or not tensor.is_contiguous():
        raise KernelArgumentError(name, "is not float32, contiguous, in a CPU's memory")


def _require_places(name: str, tensor: Tensor, tokens: int) -> None:
    if tensor.dtype is not torch.int64 or tensor.shape != (tokens,) or not tensor.is_contiguous():
        raise KernelArgumentError(name, f"are not int64 [{tokens}]")
