"""A call of the public function that starts each production variant, with tensors as an engine has them.

Sizes are small where a variant serves all sizes; types, strides and alignment are those of a model. A kernel without a
call here fails `test_prebuilt.py` by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from millstream_kernels.attention.decode import paged_decode_attention
from millstream_kernels.attention.mla import mla_attention
from millstream_kernels.attention.prefill import paged_prefill_attention
from millstream_kernels.attention.specification import PagedRequests, Scores
from millstream_kernels.elementwise.codes import Codes
from millstream_kernels.elementwise.gated_activation import (
    Activation,
    gated_activation,
    gated_activation_quantized,
)
from millstream_kernels.elementwise.quantize_rows import quantize_rows
from millstream_kernels.elementwise.rms_norm import rms_norm, rms_norm_quantized
from millstream_kernels.elementwise.rope_kv_write import HeadNorm, PagedPool, Rotary, rope_kv_write
from millstream_kernels.experts.combine import combine
from millstream_kernels.experts.placement import place
from millstream_kernels.experts.product import expert_linear
from millstream_kernels.experts.routing import RoutingRule, route
from millstream_kernels.linear import nf4, w4a16, w8a8, w8a16, w16a16
from millstream_kernels.linear.int4_weight import TILE, Int4Weight
from millstream_kernels.linear.splits import add_splits
from millstream_kernels.sampling.logprobs import describe_tokens
from millstream_kernels.sampling.sample import SamplingRows, sample_tokens
from millstream_kernels.variant import Variant

TYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32,
    "i8": torch.int8, "u8": torch.uint8, "fp8e4nv": torch.float8_e4m3fn,
}  # fmt: skip
MANY_OUTPUTS, FEW_OUTPUTS, INPUTS = 256 * TILE, 2 * TILE, 8 * TILE  # the first are not split


def start(variant: Variant, capability: int) -> None:
    """Call the function that starts `variant` on a GPU of `capability`, 80 for sm_80."""
    if variant.kernel_name not in CALLS:
        raise LookupError(f"tests/support/variant_calls.py has no call of the kernel {variant.kernel_name}")
    CALLS[variant.kernel_name](variant, capability)


def _type(variant: Variant, argument: str) -> torch.dtype:
    return TYPES[variant.arguments[argument].removeprefix("*")]


def _attend(
    variant: Variant, attention: Callable[..., Tensor], dtype: torch.dtype, lengths: list[int], new: int
) -> None:
    """32 query heads over 8 of keys; a pool of blocks of 16 tokens, head-major."""
    constants, count = variant.constants, len(lengths)
    scores = Scores(0.125, 128 if constants.get("HAS_WINDOW") else None, 30.0 if constants.get("HAS_SOFTCAP") else None)
    width = -(-max(lengths) // 16 // 4) * 4 + 4
    head_dim = int(constants["HEAD_DIM"] or 0)
    requests = PagedRequests(
        tables=torch.zeros(count, width, dtype=torch.int32),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        query_starts=torch.arange(0, new * count + 1, new, dtype=torch.int32),
        max_queries=new,
        max_length=max(lengths),
        block_size_tokens=16,
    )
    stored = _type(variant, "pool") if "pool" in variant.arguments else dtype
    pool = torch.empty(16, 64, head_dim, dtype=stored)
    scales = _scales_of(stored)
    attention(torch.empty(new * count, 32, head_dim, dtype=dtype), pool, requests, scores, kv_scales=scales)


def _scales_of(stored: torch.dtype) -> Tensor | None:
    """Of 64 slots of 16 heads; None: numbers have none."""
    return {
        torch.int8: torch.empty(16, 64, dtype=torch.float16),
        torch.uint8: torch.empty(16, dtype=torch.float32),
    }.get(stored)


def _mla(variant: Variant, _capability: int) -> None:
    """Decodes of 8 and of 32 heads, and prompts of one and of more tiles."""
    for num_heads, lengths, new in ((8, [700, 33], 1), (32, [40], 1), (1, [300], 18), (32, [300], 40)):
        count = len(lengths)
        requests = PagedRequests(
            tables=torch.zeros(count, 48, dtype=torch.int32),
            lengths=torch.tensor(lengths, dtype=torch.int32),
            query_starts=torch.arange(0, new * count + 1, new, dtype=torch.int32),
            max_queries=new,
            max_length=max(lengths),
            block_size_tokens=16,
        )
        dtype = torch.bfloat16
        query, pool = torch.empty(new * count, num_heads, 576, dtype=dtype), torch.empty(1, 64, 576, dtype=dtype)
        mla_attention(query, pool, 512, requests, 0.125)


def _decode(variant: Variant, _capability: int) -> None:
    if variant.constants["HEAD_DIM"] == 512:  # a latent
        _mla(variant, _capability)
        return
    argument = "output" if "output" in variant.arguments else "query"
    for lengths, new in (([1, 700, 33], 1), ([40], 5)):
        _attend(variant, paged_decode_attention, _type(variant, argument), lengths, new)


def _prefill(variant: Variant, _capability: int) -> None:
    for lengths, new in (([64, 700], 40), ([300], 300)):
        _attend(variant, paged_prefill_attention, _type(variant, "query"), lengths, new)


def _norm(variant: Variant, _capability: int) -> None:
    constants = variant.constants
    size, dtype = int(constants["BLOCK"] or 0), _type(variant, "x")
    x, weight = torch.empty(3, size, dtype=dtype), torch.empty(size, dtype=_type(variant, "weight"))
    options: dict[str, Any] = {
        "residual": torch.empty_like(x) if constants["HAS_RESIDUAL"] else None,
        "one_plus_weight": constants["ONE_PLUS_WEIGHT"],
        "cast_before_weight": constants["CAST_BEFORE_WEIGHT"],
    }
    if constants["QUANTIZES"]:
        rms_norm_quantized(x, weight, 1e-5, Codes.INT8 if constants["INT8"] else Codes.E4M3, **options)
    else:
        rms_norm(x, weight, 1e-5, **options)


def _gate(variant: Variant, _capability: int) -> None:
    activation = Activation.GELU_TANH if variant.constants["GELU"] else Activation.SILU
    for size in (1536, 14336):
        gated_activation(torch.empty(3, 2 * size, dtype=_type(variant, "x")), activation)


def _gate_quantized(variant: Variant, _capability: int) -> None:
    activation = Activation.GELU_TANH if variant.constants["GELU"] else Activation.SILU
    codes = Codes.INT8 if variant.constants["INT8"] else Codes.E4M3
    gated_activation_quantized(torch.empty(3, 28672, dtype=_type(variant, "x")), activation, codes)


def _rope(variant: Variant, _capability: int) -> None:
    head_dim, dtype = int(variant.constants["HEAD_DIM"] or 0), _type(variant, "qkv")
    angles = torch.empty(64, int(variant.constants["ROTARY_DIM"] or 0) // 2)
    stored_type = _type(variant, "pool")
    pool = PagedPool(torch.empty(16, 64, head_dim, dtype=stored_type), _scales_of(stored_type))
    norm = HeadNorm(torch.empty(40, head_dim, dtype=dtype), 1e-6) if variant.constants["HAS_NORM"] else None
    places = torch.arange(3)
    rotary = Rotary(angles, torch.empty_like(angles), bool(variant.constants["INTERLEAVED"]))
    rope_kv_write(torch.empty(3, 48, head_dim, dtype=dtype), 32, rotary, places, places, pool, norm=norm)


def _sample(variant: Variant, _capability: int) -> None:
    count = 3
    ones = torch.ones(count)
    rows = SamplingRows(
        ones, torch.ones(count, dtype=torch.int32), ones.double(), ones, torch.arange(count), torch.arange(count)
    )
    for size in (151_936, 32_003):
        sample_tokens(torch.empty(count, size, dtype=_type(variant, "logits")), rows)


def _describe(variant: Variant, _capability: int) -> None:
    for size in (151_936, 32_003):
        describe_tokens(torch.empty(3, size, dtype=_type(variant, "logits")), torch.zeros(3, dtype=torch.int64), 20)


def _sum(variant: Variant, _capability: int) -> None:
    output = torch.empty(3, FEW_OUTPUTS, dtype=_type(variant, "output"))
    for bias in (None, torch.empty(FEW_OUTPUTS, dtype=output.dtype)):
        add_splits(torch.empty(4, 3, FEW_OUTPUTS), bias, output)


def _shape_of(own: Any) -> tuple[Any, ...]:
    """Of a plan of a product."""
    return own.block_rows, own.num_warps, own.num_stages, own.writes_partials


def _shape_of_variant(variant: Variant) -> tuple[Any, ...]:
    constants = variant.constants
    return constants["BLOCK_ROWS"], variant.num_warps, variant.num_stages, constants["PARTIAL"]


def _w4a16(variant: Variant, capability: int) -> None:
    constants, dtype = variant.constants, _type(variant, "x")
    group_size = 32 * int(constants["GROUP_RUNS"] or 0)
    for num_outputs in (FEW_OUTPUTS, MANY_OUTPUTS):
        weight = _int4_weight(num_outputs, group_size)
        for num_rows in (1, 16, 17, 64, 65, 200):
            if _shape_of(w4a16.plan(num_rows, weight, capability)) == _shape_of_variant(variant):
                w4a16.w4a16_linear(torch.empty(num_rows, INPUTS, dtype=dtype), weight)


def _int4_weight(num_outputs: int, group_size: int) -> Int4Weight:
    codes = torch.empty(num_outputs // TILE, INPUTS // TILE, TILE, 16, dtype=torch.int32)
    groups = torch.empty(num_outputs // TILE, INPUTS // group_size, TILE, dtype=torch.int32)
    return Int4Weight(codes, groups, num_outputs, INPUTS, group_size, torch.float16, None)


def _w8a8(variant: Variant, capability: int) -> None:
    codes, size = _type(variant, "x"), FEW_OUTPUTS
    weight = torch.empty(size, INPUTS, dtype=codes)
    by_block = variant.constants["IS_BLOCK"]
    scales = torch.empty(size // TILE, INPUTS // TILE) if by_block else torch.empty(size)
    for num_rows in (1, 16, 17, 64, 65, 200):
        if _shape_of(w8a8.plan(num_rows, size, INPUTS, capability)) == _shape_of_variant(variant):
            x_scales = torch.empty(num_rows, INPUTS // TILE) if by_block else torch.empty(num_rows)
            w8a8.w8a8_linear(torch.empty(num_rows, INPUTS, dtype=codes), x_scales, weight, scales)


def _w8a16(variant: Variant, capability: int) -> None:
    for num_outputs in (FEW_OUTPUTS, MANY_OUTPUTS):
        weight, scales = torch.empty(num_outputs, INPUTS, dtype=_type(variant, "weight")), torch.empty(1, num_outputs)
        for num_rows in (1, 17, 200):
            if _shape_of(w8a16.plan(num_rows, num_outputs, INPUTS, capability)) == _shape_of_variant(variant):
                w8a16.w8a16_linear(torch.empty(num_rows, INPUTS, dtype=_type(variant, "x")), weight, scales)


def _w16a16(variant: Variant, capability: int) -> None:
    dtype = _type(variant, "x")
    for num_outputs in (FEW_OUTPUTS, MANY_OUTPUTS):
        weight = torch.empty(num_outputs, INPUTS, dtype=dtype)
        for num_rows in (1, 17):
            if _shape_of(w16a16.plan(num_rows, num_outputs, INPUTS, capability)) == _shape_of_variant(variant):
                w16a16.w16a16_linear(torch.empty(num_rows, INPUTS, dtype=dtype), weight)


def _nf4(variant: Variant, capability: int) -> None:
    for num_outputs in (FEW_OUTPUTS, MANY_OUTPUTS):
        absmax = torch.empty(num_outputs, INPUTS // 64, dtype=_type(variant, "absmax"))
        nested = nf4.NestedScales(torch.empty(256), torch.empty(absmax.numel() // 256), 0.5)
        codes = torch.empty(num_outputs, INPUTS // 2, dtype=torch.uint8)
        weight = nf4.Nf4Weight(codes, absmax, torch.empty(16), nested if variant.constants["IS_NESTED"] else None)
        for num_rows in (1, 17, 200):
            if _shape_of(nf4.plan(num_rows, num_outputs, INPUTS, capability)) == _shape_of_variant(variant):
                nf4.nf4_linear(torch.empty(num_rows, INPUTS, dtype=_type(variant, "x")), weight)


def _quantize(variant: Variant, _capability: int) -> None:
    quantize_rows(torch.empty(3, int(variant.constants["BLOCK"] or 0), dtype=_type(variant, "x")), Codes.INT8)


def _route(variant: Variant, _capability: int) -> None:
    constants = variant.constants
    groups, is_sigmoid = int(constants["NUM_GROUPS"] or 1), bool(constants["IS_SIGMOID"])
    size = int(variant.name.split("-")[1])
    rule = RoutingRule(min(6, size), bool(constants["NORMALISE"]), 1.0, is_sigmoid, groups, max(1, groups // 2))
    bias = torch.empty(size) if is_sigmoid else None
    route(torch.empty(3, size, dtype=_type(variant, "logits")), rule, bias)


def _place(variant: Variant, _capability: int) -> None:
    rows, num_experts = variant.constants.get("ROWS", 16), variant.constants.get("MAX_EXPERTS", 128)
    for num_tokens in (1, 5):
        place(torch.zeros(num_tokens, 8, dtype=torch.int32), int(num_experts or 0), int(rows or 0))


def _multiply_experts(variant: Variant, _capability: int) -> None:
    """Rows that are gathered, and rows in order; 8 experts of 256 inputs and 128 outputs."""
    dtype, is_gated = _type(variant, "x"), bool(variant.constants["IS_GATED"])
    placement = place(torch.zeros(3, 2, dtype=torch.int32), 8, int(variant.constants["ROWS"] or 0))
    weights = torch.empty(8, 256, 256 if is_gated else 128, dtype=dtype)
    for num_rows in (3, placement.rows.shape[0]):
        expert_linear(torch.empty(num_rows, 256, dtype=dtype), weights, placement, is_gated=is_gated)


def _combine(variant: Variant, _capability: int) -> None:
    dtype, placement = _type(variant, "residual"), place(torch.zeros(3, 2, dtype=torch.int32), 8, 16)
    computed = torch.empty(placement.rows.shape[0], 2048, dtype=dtype)
    combine(torch.empty(3, 2048, dtype=dtype), computed, placement, torch.empty(3, 2))


CALLS: dict[str, Callable[[Variant, int], None]] = {
    "paged_decode": _decode,
    "combine_splits": _decode,
    "paged_prefill": _prefill,
    "mla_rows": _mla,
    "rms_norm_row": _norm,
    "gated_tile": _gate,
    "gated_row_quantized": _gate_quantized,
    "rope_kv_write_heads": _rope,
    "sample_row": _sample,
    "describe_row": _describe,
    "sum_splits": _sum,
    "w4a16_product": _w4a16,
    "w8a8_product": _w8a8,
    "w8a16_product": _w8a16,
    "nf4_product": _nf4,
    "w16a16_product": _w16a16,
    "quantize_row": _quantize,
    "route_token": _route,
    "count_assignments": _place,
    "place_assignments": _place,
    "expert_product": _multiply_experts,
    "combine_row": _combine,
}
