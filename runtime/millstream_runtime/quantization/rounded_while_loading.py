"""Weights of 16 and 32 bits that are rounded to FP8 while they are loaded, one module at a time.

    weight, floats [out, in] in the file ──some outputs at a time──▶ float32 ──▶ float8_e4m3 codes, a scale per output

Codes and scales are those that `millstream quantize --method fp8` writes, so a layer computes what it computes from
such a folder. As there, what is no linear layer of its own keeps its type: embeddings, head, norms, routers and MLA's
`kv_b_proj`. vLLM does the same under `--quantization fp8`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millstream_runtime.models.linear.shares import Size, kept_size, total_size
from millstream_runtime.quantization.eight_bit_rounding import round_to_fp8
from millstream_runtime.quantization.quantized_layout import QuantizedLayout, Unpacked, span_of
from millstream_runtime.quantization.unquantized import UNQUANTIZED
from millstream_runtime.quantization.weight_layout import TensorSource

MOST_ELEMENTS = 1 << 20  # rounded at once: 4 MiB of float32
SCALE_BYTES = 4


@dataclass(frozen=True)
class RoundedWhileLoadingLayout(QuantizedLayout):
    """See the top of the file."""

    bits = 8

    def unpack(self, source: TensorSource, module: str, outputs: Size, inputs: Size) -> Unpacked | None:
        # An output's scale is that of its whole row, so a rank that keeps some of the inputs reads all of them.
        stored = source.read(f"{module}.weight", (outputs, total_size(inputs)))
        if source.device.type == "meta":
            return None
        codes, scales = _rounded(stored, inputs)
        groups = torch.zeros(len(codes), dtype=torch.int64)
        return Unpacked(codes, scales, f"{module}.weight", 0, groups)

    def planned_bytes(self, outputs: Size, inputs: Size) -> int:
        return kept_size(outputs) * (kept_size(inputs) + SCALE_BYTES)

    def dense_weight(self, source: TensorSource, module: str, out_features: Size, in_features: Size) -> Tensor:
        return UNQUANTIZED.dense_weight(source, module, out_features, in_features)


def _rounded(weight: Tensor, inputs: Size) -> tuple[Tensor, Tensor]:
    """Codes of the kept `inputs`, float8_e4m3 `[in, out]`, and scales of whole rows, float32 `[1, out]`.

    `weight`: floats `[out, all inputs]`, which may be a mapped file.
    """
    first, end, num_inputs = span_of(inputs)
    num_outputs, step = len(weight), max(1, MOST_ELEMENTS // num_inputs)
    codes = torch.empty(end - first, num_outputs, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(1, num_outputs, device=weight.device)
    for start in range(0, num_outputs, step):
        some = slice(start, start + step)
        rounded = round_to_fp8(weight[some].float(), per_tensor=False)
        codes[:, some] = rounded.codes[:, first:end].view(torch.uint8).t()
        scales[:, some] = rounded.scales.t()
    return codes.view(torch.float8_e4m3fn), scales
