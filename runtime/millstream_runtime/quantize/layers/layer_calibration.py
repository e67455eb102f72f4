"""The calibration of one layer: its hidden states on disk, statistics of its linear modules' inputs, its outputs.

Hidden states come from the layers before as they were quantized, so that a layer can make up for their errors (as in
GPTQ, Frantar et al. 2022, arXiv 2210.17323).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from millstream_runtime.models.config.model_config import ModelConfig
from millstream_runtime.quantize.layers.hidden_states import HiddenStates
from millstream_runtime.quantize.layers.input_statistics import InputStatistics
from millstream_runtime.quantize.layers.layer_run import LargestInCache, LayerRun
from millstream_runtime.quantize.layers.layer_weights import LayerWeights
from millstream_runtime.quantize.model_outline import LayerOutline, LinearGroup

SAMPLE_TOKENS = 64
OnShare = Callable[[float], None]  # of the work of a pass, 0 to 1


@dataclass(frozen=True, slots=True)
class LayerSample:
    """What the linear modules read, and what the layer gives, for a few tokens."""

    inputs: dict[tuple[str, ...], Tensor]  # by the modules that share them, [T, in]
    output: Tensor  # [T, hidden]


class LayerCalibration:
    """`config`: for sequences of the calibration's length. `hidden`: the file of the hidden states before the layer."""

    def __init__(
        self, config: ModelConfig, number: int, layer: LayerOutline, hidden: Path, shape: HiddenStates,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._config, self._number, self._layer = config, number, layer
        self._hidden, self._shape, self._device = hidden, shape, device

    def statistics(
        self, tensors: dict[str, Tensor], groups: Sequence[LinearGroup], *, with_moments: bool, on_share: OnShare
    ) -> dict[tuple[str, ...], InputStatistics]:
        """Return those of each group's inputs, by the modules of the group."""
        found = {
            one.modules: InputStatistics.empty(one.num_inputs, self._device, with_moments=with_moments)
            for one in groups
        }

        def observe(modules: tuple[str, ...], x: Tensor) -> None:
            if modules in found:
                found[modules].add(x)

        for _ in self._outputs(tensors, observe, on_share):
            pass
        return found

    def outputs(
        self, tensors: dict[str, Tensor], on_share: OnShare, largest: LargestInCache | None = None
    ) -> Iterator[Tensor]:
        """The hidden states behind the layer, of each sequence. `largest` counts their keys and values."""
        return self._outputs(tensors, lambda modules, x: None, on_share, largest)

    def sample(self, tensors: dict[str, Tensor]) -> LayerSample:
        """Run the layer on the first tokens of the first sequence."""
        inputs: dict[tuple[str, ...], Tensor] = {}
        weights = LayerWeights(self._layer.prefix, tensors, self._device)
        weights.observe = lambda modules, x: inputs.update({modules: x.clone()})
        first = next(self._shape.read(self._hidden))[:SAMPLE_TOKENS]
        output = LayerRun(self._config, self._number, weights)(first.clone())
        return LayerSample(inputs, output)

    def _outputs(
        self,
        tensors: dict[str, Tensor],
        observe: Callable[[tuple[str, ...], Tensor], None],
        on_share: OnShare,
        largest: LargestInCache | None = None,
    ) -> Iterator[Tensor]:
        weights = LayerWeights(self._layer.prefix, tensors, self._device)
        weights.observe = observe
        run = LayerRun(self._config, self._number, weights, largest)
        for index, hidden in enumerate(self._shape.read(self._hidden)):
            yield run(hidden)
            on_share((index + 1) / self._shape.num_sequences)
