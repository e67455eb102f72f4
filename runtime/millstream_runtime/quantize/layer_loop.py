"""Quantize a model layer by layer: each layer's file, and the hidden states that the next one starts from.

    hidden states before layer n ─► statistics ─► quantize ─► hidden states behind it, as quantized ─► layer n's file

The file of a layer is written last, so a run that was killed repeats at most one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from millstream_runtime.errors import InvalidConfigError
from millstream_runtime.quantize.calibration import CalibrationData
from millstream_runtime.quantize.layers.hidden_states import HiddenStates
from millstream_runtime.quantize.layers.layer_calibration import LayerCalibration
from millstream_runtime.quantize.layers.layer_run import LargestInCache, embed
from millstream_runtime.quantize.methods.layer_method import LayerJob, LayerMethod, stored_names
from millstream_runtime.quantize.output.kv_scales import kv_scales
from millstream_runtime.quantize.output.packing import ModuleChoice
from millstream_runtime.quantize.output.safetensors_file import TORCH_DTYPES, TensorInFile
from millstream_runtime.quantize.output.work_folder import WorkFolder
from millstream_runtime.quantize.source_model import SourceModel

OnProgress = Callable[[str, float, float], None]  # stage, done, all
EMBEDDING = "model.embed_tokens.weight"
# What a layer's time goes to, about: of the first pass, and of all that is not the second.
FIRST_PASS, SECOND_PASS_BEGINS = 0.4, 0.8


class LayerLoop:
    """See the top of the file."""

    def __init__(
        self, source: SourceModel, method: LayerMethod, choice: ModuleChoice, work: WorkFolder, device: torch.device
    ) -> None:
        self._source, self._method, self._choice = source, method, choice
        self._work, self._device = work, device

    def scratch_bytes(self, data: CalibrationData | None) -> int:
        """What the hidden states take on disk: those before a layer and behind it."""
        if data is None or not self._method.needs_data:
            return 0
        return 2 * self._shape(data.sequences).num_bytes

    def run(self, sequences: Sequence[Sequence[int]], on_progress: OnProgress) -> None:
        """Make the layers that are not done yet. `sequences`: of token ids, all of one length."""
        source, layers = self._source, self._source.outline.layers
        if not self._work.has_shard(0):
            outer = [name for name in source.outline.outer if name in source.tensors]
            self._work.write_shard(0, {name: source.tensors[name] for name in outer})
        done = self._work.num_done()
        if self._method.needs_data and done < len(layers):
            self._require_hidden(done, sequences)
        for number in range(done, len(layers)):
            on_progress("layers", number, len(layers))

            def on_share(share: float, number: int = number) -> None:
                on_progress("layers", number + share, len(layers))

            self._make(number, sequences, on_share)
        on_progress("layers", len(layers), len(layers))

    def _make(self, number: int, sequences: Sequence[Sequence[int]], on_share: Callable[[float], None]) -> None:
        source, work, layer = self._source, self._work, self._source.outline.layers[number]
        groups = self._choice.groups(layer)
        tensors = {name: one.to(self._device) for name, one in source.load_layer(layer).items()}
        calibration = None
        if self._method.needs_data:
            config, shape = source.config_for(len(sequences[0])), self._shape(sequences)
            calibration = LayerCalibration(config, number, layer, work.hidden(number), shape, self._device)
        stored = {name: TORCH_DTYPES[source.tensors[name].dtype] for name in tensors}
        job = LayerJob(layer, groups, tensors, stored, calibration, lambda share: on_share(FIRST_PASS * share))
        made = self._method.quantize(job)
        scales: dict[str, Tensor] = {}
        if calibration is not None:
            scales = self._run_quantized(number, calibration, tensors, self._shape(sequences), on_share)
        names = [name for name in stored_names(layer, groups, source.tensors) if name not in made.changed]
        kept: dict[str, Tensor | TensorInFile] = {name: source.tensors[name] for name in names}
        changed = {name: tensors[name].to(stored[name]) for name in made.changed}
        work.write_shard(number + 1, kept | changed | made.packed | scales)
        work.hidden(number).unlink(missing_ok=True)

    def _run_quantized(
        self,
        number: int,
        calibration: LayerCalibration,
        tensors: dict[str, Tensor],
        shape: HiddenStates,
        on_share: Callable[[float], None],
    ) -> dict[str, Tensor]:
        """Run the layer as it was quantized: write the hidden states of the next, return the scales of its KV cache."""
        largest = LargestInCache()
        outputs = calibration.outputs(
            tensors, lambda share: on_share(SECOND_PASS_BEGINS + (1 - SECOND_PASS_BEGINS) * share), largest
        )
        if number + 1 < len(self._source.outline.layers):
            self._work.write(self._work.hidden(number + 1), partial(_write, shape, outputs))
        else:
            for _ in outputs:
                pass
        return kv_scales(self._source.outline.layers[number].prefix, largest)

    def _require_hidden(self, number: int, sequences: Sequence[Sequence[int]]) -> None:
        """Those before the first layer are made here; the others by the layer before."""
        hidden = self._work.hidden(number)
        if hidden.exists():
            return
        if number:
            raise InvalidConfigError(
                f"{hidden} is missing, so the run cannot go on after layer {number}; remove {self._work.path} to begin "
                "again."
            )
        config = self._source.config_for(len(sequences[0]))
        embedded = embed(config, self._source.tensors[EMBEDDING], sequences)
        self._work.write(hidden, partial(_write, self._shape(sequences), embedded))

    def _shape(self, sequences: Sequence[Sequence[int]]) -> HiddenStates:
        return HiddenStates(len(sequences), len(sequences[0]), self._source.config.hidden_size)


def _write(shape: HiddenStates, sequences: Iterator[Tensor], path: Path) -> None:
    shape.write(path, sequences)
