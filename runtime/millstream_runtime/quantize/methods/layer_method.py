"""What a method does with one layer: its float32 tensors in, packed tensors out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from millstream_runtime.quantize.layers.input_statistics import InputStatistics
from millstream_runtime.quantize.layers.layer_calibration import LayerCalibration, OnShare
from millstream_runtime.quantize.methods.awq_search import ScaledModules
from millstream_runtime.quantize.methods.scale_folds import find_folds
from millstream_runtime.quantize.model_outline import LayerOutline, LinearGroup
from millstream_runtime.quantize.output.packing import Packing


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


def scale_inputs(
    job: LayerJob,
    statistics: dict[tuple[str, ...], InputStatistics],
    found: QuantizedLayer,
    search: Callable[[Sequence[ScaledModules], bool], Tensor],
    *,
    norms_only: bool = False,
) -> None:
    """Scale the inputs of modules by what `search` finds, and move the inverse into what makes them.

    Args:
        search: gets the modules that read one input, and whether scales must be powers of two.
        norms_only: leave inputs alone that another module makes.
    """
    if job.calibration is None:
        return
    prefix = job.layer.prefix
    for fold in find_folds(job.layer, job.groups, job.tensors, job.calibration.sample):
        if norms_only and fold.offset is None:
            continue
        readers = [tuple(prefix + module for module in group) for group in fold.consumers]
        scaled = [
            ScaledModules(torch.cat([job.tensors[f"{module}.weight"] for module in modules]), statistics[modules])
            for modules in readers
        ]
        scales = search(scaled, bool(fold.routers))
        del scaled  # as large as the weights themselves
        scales = fold.apply(job.layer, job.tensors, scales, job.stored[prefix + fold.producer])
        for modules in readers:
            statistics[modules].divide(scales)
        found.changed |= {prefix + name for name in fold.changed if prefix + name in job.tensors}


def stored_names(layer: LayerOutline, groups: Sequence[LinearGroup], present: Mapping[str, object]) -> list[str]:
    """Return the tensors of a layer that stay in the file: all but the weights of the quantized modules."""
    quantized = {f"{module}.weight" for group in groups for module in group.modules}
    return [name for name in layer.tensors if name in present and name not in quantized]
