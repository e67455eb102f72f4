"""INT8 and FP8: one 8-bit code per weight, and a scale per output or tensor.

int8              code in -127 .. 127, scale = max|w| / 127 per output, after SmoothQuant
fp8, dynamic      float8_e4m3, scale = max|w| / 448 per output (Micikevicius et al. 2022, arXiv 2209.05433)
fp8, static       the same per tensor, and a scale of activations from the calibration data
"""

from __future__ import annotations

import torch

from millstream_runtime.quantization.eight_bit_rounding import FP8_MAX, round_to_fp8, round_to_int8
from millstream_runtime.quantize.methods.layer_method import LayerJob, QuantizedLayer, scale_inputs
from millstream_runtime.quantize.methods.smoothquant import smoothing_scales
from millstream_runtime.quantize.output.compressed_tensors import EightBitPacking


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
