"""INT8 and FP8: one 8-bit code per weight, and a scale per output or tensor.

int8              code in -127 .. 127, scale = max|w| / 127 per output, after SmoothQuant
fp8, dynamic      float8_e4m3, scale = max|w| / 448 per output (Micikevicius et al. 2022, arXiv 2209.05433)
fp8, static       the same per tensor, and a scale of activations from the calibration data
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millstream_runtime.quantize.methods.layer_method import LayerJob, QuantizedLayer, scale_inputs
from millstream_runtime.quantize.methods.smoothquant import smoothing_scales
from millstream_runtime.quantize.output.compressed_tensors import EightBitPacking

INT8_MAX, FP8_MAX = 127.0, 448.0
SMALLEST_SCALE = 2.0**-126  # of float32, normal numbers


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """`codes`: int8 or float8_e4m3 `[out, in]`; `scales`: float32 `[out, 1]` or `[1]`."""

    codes: Tensor
    scales: Tensor

    def dequantized(self) -> Tensor:
        """float32 `[out, in]`."""
        return self.codes.float() * self.scales


def round_to_int8(weight: Tensor) -> ScaledWeight:
    scales = (weight.abs().amax(1, keepdim=True) / INT8_MAX).clamp(min=SMALLEST_SCALE)
    return ScaledWeight((weight / scales).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8), scales)


def round_to_fp8(weight: Tensor, *, per_tensor: bool) -> ScaledWeight:
    largest = weight.abs().amax().reshape(1) if per_tensor else weight.abs().amax(1, keepdim=True)
    scales = (largest / FP8_MAX).clamp(min=SMALLEST_SCALE)
    return ScaledWeight((weight / scales).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scales)


class Int8:
    """W8A8 with SmoothQuant; activations are scaled by the server, row by row."""

    needs_data = True

    def __init__(self, packing: EightBitPacking) -> None:
        self.packing = packing

    def quantize(self, job: LayerJob) -> QuantizedLayer:
        statistics = job.statistics(with_moments=False)
        found = QuantizedLayer()
        scale_inputs(job, statistics, found, smoothing_scales, norms_only=True)
        for module in (module for group in job.groups for module in group.modules):
            rounded = round_to_int8(job.tensors[f"{module}.weight"])
            job.tensors[f"{module}.weight"] = rounded.dequantized()
            found.packed |= {f"{module}.weight": rounded.codes, f"{module}.weight_scale": rounded.scales}
        return found


class Fp8:
    """Scales of activations are made here (`static`), or by the server row by row, which needs no data."""

    def __init__(self, packing: EightBitPacking) -> None:
        self.packing = packing
        self.needs_data = packing.has_static_inputs

    def quantize(self, job: LayerJob) -> QuantizedLayer:
        statistics = job.statistics(with_moments=False) if self.needs_data else {}
        most = max((float(one.absolute_max.max()) for one in statistics.values()), default=0.0)
        found = QuantizedLayer()
        for group in job.groups:
            for module in group.modules:
                rounded = round_to_fp8(job.tensors[f"{module}.weight"], per_tensor=self.needs_data)
                job.tensors[f"{module}.weight"] = rounded.dequantized()
                found.packed |= {f"{module}.weight": rounded.codes, f"{module}.weight_scale": rounded.scales}
                if group.modules in statistics:
                    # An expert that no token chose gets the layer's largest.
                    largest = float(statistics[group.modules].absolute_max.max()) or most
                    found.packed[f"{module}.input_scale"] = torch.tensor([max(largest, 1e-6) / FP8_MAX])
        return found
