"""GGUF's blocks made from weights: Q8_0 and Q4_K, as `quantization.gguf_blocks` reads them. No data is needed.

Q8_0    scale = max|w| / 127 of 32 weights
Q4_K    of 32 weights w ~ scale * code - least, with the least weighted squared error over a search of code steps; then
        scales and least weights of 8 such groups in 6 bits each. The search is that of ggml/src/ggml-quants.c
        (`make_qkx2_quants`), by which its own files are made.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millstream_runtime.gguf.block_types import BlockType
from millstream_runtime.quantize.methods.layer_method import LayerJob, QuantizedLayer
from millstream_runtime.quantize.output.gguf_packing import GgufPacking

ELEMENTS_AT_ONCE = 1 << 20
CODES, GROUP, GROUPS, SCALE_CODES = 15, 32, 8, 63  # Q4_K
NUM_STEPS, FIRST_STEP, STEP = 21, -1.0, 0.1  # of the search; how many codes a range has more than CODES


class GgufBlocks:
    """Each weight becomes a code of its block."""

    needs_data = False

    def __init__(self, packing: GgufPacking) -> None:
        self.packing = packing

    def quantize(self, job: LayerJob) -> QuantizedLayer:
        found = QuantizedLayer()
        for module in (module for group in job.groups for module in group.modules):
            name = f"{module}.weight"
            found.packed[name] = to_blocks(job.tensors.pop(name), self.packing.kind)
        return found


def to_blocks(weight: Tensor, kind: BlockType) -> Tensor:
    """uint8 `[out, bytes of a row]` of a float32 weight `[out, in]`."""
    make = {"Q8_0": to_q8_0, "Q4_K": to_q4_k}[kind.name]
    num_outputs, num_inputs = weight.shape
    found = torch.empty(num_outputs, kind.row_bytes(num_inputs), dtype=torch.uint8, device=weight.device)
    step = max(1, ELEMENTS_AT_ONCE // num_inputs)
    for first in range(0, num_outputs, step):
        rows = weight[first : first + step]
        found[first : first + step] = make(rows.reshape(-1, kind.block_elements)).view(len(rows), -1)
    return found


def to_q8_0(blocks: Tensor) -> Tensor:
    """uint8 `[n, 34]` of float32 `[n, 32]`."""
    scales = blocks.abs().amax(1, keepdim=True) / 127
    inverse = torch.where(scales == 0, 0.0, 1 / scales)
    scaled = blocks * inverse
    codes = (scaled.abs() + 0.5).floor() * scaled.sign()  # halves away from zero, as ggml
    return torch.cat((_halves(scales), codes.to(torch.int8).view(torch.uint8)), dim=1)


def to_q4_k(blocks: Tensor) -> Tensor:
    """uint8 `[n, 144]` of float32 `[n, 256]`."""
    grouped = blocks.view(-1, GROUPS, GROUP)
    scales, least = _best_range(grouped)
    scale_codes, scale = _six_bits(scales)
    least_codes, step = _six_bits(least)
    found = (scale.half().float() * scale_codes).unsqueeze(-1)
    offset = (step.half().float() * least_codes).unsqueeze(-1)
    codes = torch.where(found > 0, (grouped + offset) / found, 0.0).round().clamp_(0, CODES).to(torch.uint8)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4  # two groups share their bytes
    return torch.cat(
        (_halves(scale), _halves(step), _packed_six_bits(scale_codes, least_codes), packed.flatten(1)), dim=1
    )


def _best_range(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and least weights, both `[n, 8]` and not negative, with which `scale * code - least` is nearest to x."""
    weights = x.square().mean(-1, keepdim=True).sqrt() + x.abs()
    low, high = x.amin(-1).clamp(max=0), x.amax(-1)
    span = (high - low).clamp(min=torch.finfo(torch.float32).tiny)
    sum_weights, sum_x = weights.sum(-1), (weights * x).sum(-1)
    scale, least = span / CODES, low.clone()
    codes = _codes(x, low, CODES / span)
    error = _error(x, weights, codes, scale, least)
    for index in range(NUM_STEPS):
        codes = _codes(x, low, (FIRST_STEP + STEP * index + CODES) / span)
        weighted = weights * codes
        sum_codes, sum_squares, sum_both = weighted.sum(-1), (weighted * codes).sum(-1), (weighted * x).sum(-1)
        determinant = sum_weights * sum_squares - sum_codes.square()
        divisor = torch.where(determinant > 0, determinant, 1.0)
        own_scale = (sum_weights * sum_both - sum_x * sum_codes) / divisor
        own_least = (sum_squares * sum_x - sum_codes * sum_both) / divisor
        without = sum_both / sum_squares.clamp(min=torch.finfo(torch.float32).tiny)
        own_scale = torch.where(own_least > 0, without, own_scale)
        own_least = own_least.clamp(max=0)
        own_error = _error(x, weights, codes, own_scale, own_least)
        better = (determinant > 0) & (own_error < error) & (own_scale > 0)
        scale, least = torch.where(better, own_scale, scale), torch.where(better, own_least, least)
        error = torch.where(better, own_error, error)
    return torch.where(high > low, scale, 0.0), -least


def _codes(x: Tensor, low: Tensor, steps: Tensor) -> Tensor:
    return ((x - low.unsqueeze(-1)) * steps.unsqueeze(-1)).round_().clamp_(0, CODES)


def _error(x: Tensor, weights: Tensor, codes: Tensor, scale: Tensor, least: Tensor) -> Tensor:
    change = codes * scale.unsqueeze(-1) + least.unsqueeze(-1) - x
    return (weights * change.square()).sum(-1)


def _six_bits(values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes `[n, 8]`, and their scale `[n, 1]`."""
    largest = values.amax(-1, keepdim=True)
    codes = torch.where(largest > 0, values * (SCALE_CODES / largest), 0.0).round().clamp_(0, SCALE_CODES)
    return codes, largest / SCALE_CODES


def _packed_six_bits(scales: Tensor, least: Tensor) -> Tensor:
    """uint8 `[n, 12]` of codes `[n, 8]` each; the inverse of `gguf_blocks._six_bit_scales`."""
    first, second = scales.to(torch.uint8), least.to(torch.uint8)
    return torch.cat(
        (
            first[:, :4] | (first[:, 4:] >> 4) << 6,
            second[:, :4] | (second[:, 4:] >> 4) << 6,
            first[:, 4:] & 15 | (second[:, 4:] & 15) << 4,
        ),
        dim=1,
    )


def _halves(values: Tensor) -> Tensor:
    """float16 `[n, 1]` as bytes `[n, 2]`."""
    return values.half().contiguous().view(torch.uint8)
