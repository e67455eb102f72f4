"""The layers of a checkpoint that is being made, in a folder that a run goes on from.

    .OUT.quantize/          see `resumable_folder`
        held_out.jsonl      documents that judge the result
        hidden-00003.f32    the hidden states before layer 3, where a method needs them
        model/
            model-00004-of-00033.safetensors    exists once its layer is done
        layers/             has those files instead, where the model becomes one GGUF file

A layer's file is renamed last, so it says that all of the layer is done.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from millstream_runtime.model_output.resumable_folder import ResumableFolder, writing
from millstream_runtime.models.loading.checkpoint import INDEX_NAME
from millstream_runtime.quantize.output.safetensors_file import TensorInFile, tensors_of, write_file


class WorkFolder(ResumableFolder):
    """`keeps_layers`: the files of layers belong to the model."""

    def __init__(self, out: Path, num_layers: int, *, keeps_layers: bool = True) -> None:
        super().__init__(out, "quantize")
        self._layers = self.model if keeps_layers else self.path / "layers"
        self.held_out = self.path / "held_out.jsonl"
        self._num_layers = num_layers

    def open(self, job: Mapping[str, Any], say: Callable[[str], None], *, discard_other: bool = False) -> None:
        super().open(job, say, discard_other=discard_other)
        with writing(self.path):
            self._layers.mkdir(exist_ok=True)

    def num_done(self) -> int:
        """Return how many layers are done, counted from the first."""
        done = 0
        while done < self._num_layers and self.has_shard(done + 1):
            done += 1
        return done

    def has_shard(self, number: int) -> bool:
        """Whether the file of a layer is there, whole; one that is cut is removed."""
        return self.read(self.shard(number), _whole_tensors) is not None

    def shard(self, number: int) -> Path:
        """Return the file of a layer, counted from 1; 0 is that of the tensors outside of the layers."""
        return self._layers / f"model-{number + 1:05}-of-{self._num_layers + 1:05}.safetensors"

    def hidden(self, layer: int) -> Path:
        """Return the file of the hidden states before a layer, counted from 0."""
        return self.path / f"hidden-{layer:05}.f32"

    def write_shard(self, number: int, tensors: Mapping[str, Tensor | TensorInFile]) -> None:
        """Write the file of a layer, whole or not at all."""
        self.write(self.shard(number), lambda path: write_file(path, tensors))

    def tensors(self) -> dict[str, TensorInFile]:
        """All tensors by name, those outside of the layers first."""
        found: dict[str, TensorInFile] = {}
        for number in range(self._num_layers + 1):
            found |= dict(sorted(tensors_of(self.shard(number)).items()))
        return found

    def write_index(self) -> None:
        """Write the index of all files, which must be there."""
        weight_map, total_bytes = {}, 0
        for name, one in self.tensors().items():
            weight_map[name] = one.path.name
            total_bytes += one.num_bytes
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        self.write_text(self.model / INDEX_NAME, text)


def _whole_tensors(path: Path) -> dict[str, TensorInFile]:
    """Raises ValueError: the file is cut."""
    found = tensors_of(path)
    if max(one.offset_bytes + one.num_bytes for one in found.values()) != path.stat().st_size:
        raise ValueError(f"{path} is cut")
    return found
