"""What a method does with one layer: its float32 tensors in, packed tensors out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from millstream_runtime.quantize.methods.rounding import round_to_groups
from millstream_runtime.quantize.model_outline import LayerOutline, LinearGroup
from millstream_runtime.quantize.output.packing import BITS, AwqPacking, Packing


class LayerMethod(Protocol):
    """How the layers of one model are quantized."""

    @property
    def packing(self) -> Packing: ...

    def quantize(self, groups: Sequence[LinearGroup], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the packed tensors of the modules of `groups`. `tensors`: of the layer, float32."""


class RoundToNearest:
    """Each weight becomes the nearest code: no data, seconds per billion weights, and the largest loss of quality."""

    def __init__(self, packing: AwqPacking) -> None:
        self.packing: Packing = packing
        self._group_size = packing.group_size

    def quantize(self, groups: Sequence[LinearGroup], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for group in groups:
            for module in group.modules:
                codes = round_to_groups(tensors.pop(f"{module}.weight"), BITS, self._group_size)
                found |= self.packing.pack(module, codes)
        return found


def stored_names(layer: LayerOutline, groups: Sequence[LinearGroup], present: Mapping[str, object]) -> list[str]:
    """Return the tensors of a layer that stay in the file: all but the weights of the quantized modules."""
    quantized = {f"{module}.weight" for group in groups for module in group.modules}
    return [name for name in layer.tensors if name in present and name not in quantized]
