"""Which code computes with a quantized weight on which device: a table by device and least compute capability."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from millstream_kernels.cpu.integer import check as integer_check
from millstream_kernels.cpu.integer.layouts import FORMATS
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.models.linear.linear import Linear
from millstream_runtime.quantization.block_weight import BlockLinear, BlockWeight
from millstream_runtime.quantization.cpu import code_table, int4_linear, int8_linear
from millstream_runtime.quantization.cpu.gguf_codes import integer_weight
from millstream_runtime.quantization.cpu.integer_linear import IntegerLinear
from millstream_runtime.quantization.cpu.table_linear import TableLinear
from millstream_runtime.quantization.gpu.whole_linear import whole_linear
from millstream_runtime.quantization.grouped_weight import GroupedWeight
from millstream_runtime.quantization.quantized_linear import DequantizingLinear
from millstream_runtime.quantization.weight_layout import TensorSource

QuantizedWeight = GroupedWeight | BlockWeight
Make = Callable[[TensorSource, QuantizedWeight, Tensor | None], Linear]


@dataclass(frozen=True, slots=True)
class Implementation:
    """`make` gives the layer of a weight of `bits` on a device of this type and capability."""

    bits: tuple[int, ...]
    device: str  # torch.device.type
    least_capability: int  # of CUDA, 90 is 9.0; 0 elsewhere
    make: Make


def linear_for(source: TensorSource, weight: QuantizedWeight, bias: Tensor | None) -> Linear:
    """Return the layer of a weight, which is counted in the source's bytes.

    Raises:
        RuntimeFailure: UnsupportedByRuntime, nothing computes such weights on this device.
    """
    made = source.packed_linear(weight, bias) if isinstance(weight, GroupedWeight) else None
    if made is not None:
        return made
    device = source.device
    capability = 0
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        capability = 10 * major + minor
    fitting = [
        one
        for one in _IMPLEMENTATIONS
        if one.device == device.type and weight.bits in one.bits and capability >= one.least_capability
    ]
    if not fitting:
        raise RuntimeFailure(
            FailureReason.UNSUPPORTED_BY_RUNTIME,
            f"No code computes quantized weights of {weight.bits} bits on {device.type} in this version; serve the "
            "model on a CPU (--device cpu), or its checkpoint of 16 bits.",
        )
    return max(fitting, key=lambda one: one.least_capability).make(source, weight, bias)


def _on_a_cpu(source: TensorSource, weight: QuantizedWeight, bias: Tensor | None) -> Linear:
    """By 8-bit activations where the format asks for them or is one of GGUF, by bfloat16 ones where codes have 4 bits,
    the last two where no other arithmetic was asked for, else dequantized once: each where there is memory for it.

    Dequantized in float32 and wider only: there the other ways round alike.
    """
    if (linear := _by_int8_activations(source, weight, bias)) is not None:
        return linear
    if (linear := _by_integer_sums(source, weight, bias)) is not None:
        return linear
    if (linear := _by_bfloat16_activations(source, weight, bias)) is not None:
        return linear
    num_elements = weight.num_inputs * weight.num_outputs
    more_bytes = num_elements * source.dtype.itemsize - weight.num_bytes
    kept_as = str(source.dtype).removeprefix("torch.")
    if source.dtype.itemsize < torch.float32.itemsize:
        return _packed_on_a_cpu(source, weight, bias, f"{kept_as} would round it once more")
    if not source.memory.reserve(more_bytes):
        return _packed_on_a_cpu(source, weight, bias, f"memory has no room for it in {kept_as}")
    source.count(weight.num_bytes)
    reason = f"no quicker kernel takes its format here, and memory has room for it in {kept_as}"
    source.note_implementation("dequantized when loaded", reason)
    dense = weight.dense(source.dtype)
    if source.memory.is_output_major(num_elements):
        dense = dense.t().contiguous().t()
    return source.memory.linear(dense, bias)


def _by_int8_activations(source: TensorSource, weight: QuantizedWeight, bias: Tensor | None) -> Linear | None:
    if not isinstance(weight, GroupedWeight) or source.dtype != torch.float32 or not int8_linear.fits(weight):
        return None
    if not source.memory.reserve(max(0, int8_linear.packed_bytes(weight) - weight.num_bytes)):
        return None
    source.count(weight.num_bytes)
    is_whole = int8_linear.levels() == 127
    if is_whole:
        source.note_implementation("8-bit activations", "the checkpoint asks for them")
    else:
        reason = "the checkpoint asks for 8 bits, and sums of this processor have room for 7"
        source.note_implementation("8-bit activations, 7 bits used", reason)
    return int8_linear.int8_linear(weight, bias)


def _by_integer_sums(source: TensorSource, weight: QuantizedWeight, bias: Tensor | None) -> Linear | None:
    """Of a weight in GGUF's blocks, held in the bits of its codes. Scales of 6 bits become bytes, so Q4_K and Q5_K take
    up to 1.03 times the file's bytes; a plan counts the file's, and has its margin."""
    if not isinstance(weight, BlockWeight) or weight.kind.name not in FORMATS:
        return None
    if not source.may_round_activations or source.dtype != torch.float32:
        return None
    product, _ = integer_check.load()
    if product is None:
        return None
    held = integer_weight(weight)
    source.count(held.num_bytes)
    reason = f"a kernel for {product.instructions} computes its format"
    source.note_implementation("8-bit activations per 32 inputs by packed codes", reason)
    return IntegerLinear(product, held, bias)


def _by_bfloat16_activations(source: TensorSource, weight: QuantizedWeight, bias: Tensor | None) -> Linear | None:
    if not source.may_round_activations:
        return None
    if not isinstance(weight, GroupedWeight) or source.dtype != torch.float32 or not int4_linear.fits(weight):
        return None
    linear = int4_linear.int4_linear(weight, bias)
    if not source.memory.reserve(max(0, linear.num_bytes - weight.num_bytes)):
        return None
    source.count(min(weight.num_bytes, linear.num_bytes))
    reason = "torch's kernel takes its groups, and memory has room for the kernel's form"
    source.note_implementation("4-bit weights by bfloat16 activations", reason)
    return linear


def _packed_on_a_cpu(source: TensorSource, weight: QuantizedWeight, bias: Tensor | None, reason: str) -> Linear:
    """`reason`: why it is not dequantized when it is loaded."""
    if isinstance(weight, GroupedWeight) and source.dtype == torch.float32 and code_table.fits(weight):
        table = code_table.code_table(weight)
        source.count(table.num_bytes)
        source.note_implementation("computed from packed codes", reason)
        return TableLinear(table, bias)
    source.count(weight.num_bytes)
    source.note_implementation("dequantized in each product", f"{reason}, and no kernel here computes its packed codes")
    return BlockLinear(weight, bias) if isinstance(weight, BlockWeight) else DequantizingLinear(weight, bias)


def _on_a_gpu(source: TensorSource, weight: QuantizedWeight, bias: Tensor | None) -> Linear:
    """Where no kernel took the weight: see `models.layers.triton_layers`."""
    source.count(weight.num_bytes)
    source.note_implementation("dequantized in each product", "no kernel was chosen for it")
    return BlockLinear(weight, bias) if isinstance(weight, BlockWeight) else whole_linear(weight, bias)


_IMPLEMENTATIONS = (
    Implementation((2, 3, 4, 5, 6, 8), "cpu", 0, _on_a_cpu),
    Implementation((2, 3, 4, 5, 6, 8), "cuda", 70, _on_a_gpu),
)
