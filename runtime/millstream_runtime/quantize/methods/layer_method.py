"""What a method does with one layer: its float32 tensors in, packed tensors out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from millstream_runtime.quantize.layers.input_statistics import InputStatistics
from millstream_runtime.quantize.layers.layer_calibration import LayerCalibration, OnShare
from millstream_runtime.quantize.methods.awq_search import ScaledModules, search_scales, search_shrinks
from millstream_runtime.quantize.methods.gptq_solve import solve
from millstream_runtime.quantize.methods.rounding import round_to_groups
from millstream_runtime.quantize.methods.scale_folds import find_folds
from millstream_runtime.quantize.model_outline import LayerOutline, LinearGroup
from millstream_runtime.quantize.output.packing import BITS, AwqPacking, GptqPacking, Packing
from millstream_runtime.quantize.settings import Method

DAMPING = 0.01  # of GPTQ, as its authors chose it


@dataclass(slots=True)
class QuantizedLayer:
    """`packed`: tensors of the quantized modules. `changed`: names of other tensors of the layer with new values."""

    packed: dict[str, Tensor] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)


@dataclass(slots=True)
class LayerJob:
    """One layer to quantize.

    Attributes:
        groups: of the modules to quantize.
        tensors: of the layer, float32; those of quantized modules are replaced by what a loader computes with.
        stored: the dtype of each in the model.
        calibration: None for a method without data.
    """

    layer: LayerOutline
    groups: Sequence[LinearGroup]
    tensors: dict[str, Tensor]
    stored: Mapping[str, torch.dtype]
    calibration: LayerCalibration | None
    on_share: OnShare

    def statistics(self, *, with_moments: bool) -> dict[tuple[str, ...], InputStatistics]:
        if self.calibration is None:
            raise ValueError("a method that needs data got none")
        return self.calibration.statistics(self.tensors, self.groups, with_moments=with_moments, on_share=self.on_share)


class LayerMethod(Protocol):
    """How the layers of one model are quantized."""

    @property
    def packing(self) -> Packing: ...

    @property
    def needs_data(self) -> bool: ...

    def quantize(self, job: LayerJob) -> QuantizedLayer: ...


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
            inputs = statistics.pop(group.modules)
            for module in group.modules:
                weight = job.tensors[f"{module}.weight"]
                shrinks = search_shrinks(weight, inputs, BITS, self._group_size)
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
            for module in group.modules:
                codes = solve(
                    job.tensors[f"{module}.weight"],
                    inputs,
                    BITS,
                    self.packing.group_size,
                    act_order=self.packing.act_order,
                    damping=DAMPING,
                    symmetric=True,
                )
                job.tensors[f"{module}.weight"] = codes.dequantized()
                found.packed |= self.packing.pack(module, codes)
        return found


def scale_inputs(
    job: LayerJob,
    statistics: dict[tuple[str, ...], InputStatistics],
    found: QuantizedLayer,
    search: Callable[[Sequence[ScaledModules], bool], Tensor],
) -> None:
    """Scale the inputs of modules by what `search` finds, and move the inverse into what makes them.

    Args:
        search: gets the modules that read one input, and whether scales must be powers of two.
    """
    if job.calibration is None:
        return
    prefix = job.layer.prefix
    for fold in find_folds(job.layer, job.groups, job.tensors, job.calibration.sample):
        readers = [tuple(prefix + module for module in group) for group in fold.consumers]
        scaled = [
            ScaledModules(torch.cat([job.tensors[f"{module}.weight"] for module in modules]), statistics[modules])
            for modules in readers
        ]
        scales = search(scaled, bool(fold.routers))
        scales = fold.apply(job.layer, job.tensors, scales, job.stored[prefix + fold.producer])
        for modules in readers:
            statistics[modules].divide(scales)
        found.changed |= {prefix + name for name in fold.changed if prefix + name in job.tensors}


def method_for(method: Method, packing: Packing) -> LayerMethod:
    """Return what quantizes a layer in that format."""
    if isinstance(packing, GptqPacking):
        return Gptq(packing)
    if not isinstance(packing, AwqPacking):
        raise ValueError(f"{method} has no packing {packing!r}")
    return Awq(packing) if method is Method.AWQ else RoundToNearest(packing)


def stored_names(layer: LayerOutline, groups: Sequence[LinearGroup], present: Mapping[str, object]) -> list[str]:
    """Return the tensors of a layer that stay in the file: all but the weights of the quantized modules."""
    quantized = {f"{module}.weight" for group in groups for module in group.modules}
    return [name for name in layer.tensors if name in present and name not in quantized]
