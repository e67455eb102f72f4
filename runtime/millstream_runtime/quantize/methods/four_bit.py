"""RTN, AWQ and GPTQ: codes of 4 bits with a scale per group of inputs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from millstream_runtime.quantize.methods.awq_search import ScaledModules, search_scales, search_shrinks
from millstream_runtime.quantize.methods.gptq_solve import RoundingOrder, solve
from millstream_runtime.quantize.methods.layer_method import LayerJob, QuantizedLayer, scale_inputs
from millstream_runtime.quantize.methods.rounding import round_to_groups
from millstream_runtime.quantize.output.packing import BITS, AwqPacking, GptqPacking

DAMPING = 0.01  # of GPTQ, as its authors chose it


class RoundToNearest:
    """Each weight becomes the nearest code: no data, seconds per billion weights, and the largest loss of quality."""

    needs_data = False

    def __init__(self, packing: AwqPacking) -> None:
        self.packing = packing
        self._group_size = packing.group_size

    def quantize(self, job: LayerJob) -> QuantizedLayer:
        found = QuantizedLayer()
        for group in job.groups:
            for module in group.modules:
                codes = round_to_groups(job.tensors.pop(f"{module}.weight"), BITS, self._group_size)
                found.packed |= self.packing.pack(module, codes)
        return found


class Awq:
    """See `awq_search`."""

    needs_data = True

    def __init__(self, packing: AwqPacking) -> None:
        self.packing = packing
        self._group_size = packing.group_size

    def quantize(self, job: LayerJob) -> QuantizedLayer:
        statistics = job.statistics(with_moments=True)
        found = QuantizedLayer()
        scale_inputs(job, statistics, found, self._search)
        for group in job.groups:
            moments = statistics.pop(group.modules).group_moments(self._group_size)
            for module in group.modules:
                weight = job.tensors[f"{module}.weight"]
                shrinks = search_shrinks(weight, moments, BITS)
                codes = round_to_groups(weight, BITS, self._group_size, shrinks)
                job.tensors[f"{module}.weight"] = codes.dequantized()
                found.packed |= self.packing.pack(module, codes)
        return found

    def _search(self, groups: Sequence[ScaledModules], powers_of_two: bool) -> Tensor:
        return search_scales(groups, BITS, self._group_size, powers_of_two=powers_of_two)


class Gptq:
    """See `gptq_solve`."""

    needs_data = True

    def __init__(self, packing: GptqPacking) -> None:
        self.packing = packing

    def quantize(self, job: LayerJob) -> QuantizedLayer:
        statistics = job.statistics(with_moments=True)
        found = QuantizedLayer()
        for group in job.groups:
            inputs = statistics.pop(group.modules)
            shared = RoundingOrder.of(inputs, self.packing.group_size, self.packing.act_order, DAMPING)
            for module in group.modules:
                weight = job.tensors[f"{module}.weight"]
                codes = solve(weight, shared, BITS, self.packing.group_size, symmetric=True)
                job.tensors[f"{module}.weight"] = codes.dequantized()
                found.packed |= self.packing.pack(module, codes)
        return found
