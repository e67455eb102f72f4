"""The model that is quantized: checked once, its tensors read one by one. Refuses what cannot be quantized."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from millstream_runtime.draft_heads import head_kind
from millstream_runtime.errors import InvalidConfigError, RuntimeFailure
from millstream_runtime.gguf.gguf_model import read_gguf_folder
from millstream_runtime.model_families import WITH_VISION
from millstream_runtime.models.config.fields import Fields
from millstream_runtime.models.config.model_config import ModelConfig, architecture_of
from millstream_runtime.models.loading.checkpoint import Checkpoint, check_finite, file_of_each, safetensors_files
from millstream_runtime.models.loading.unread_tensors import refuse_unread
from millstream_runtime.models.registry import load_model_config
from millstream_runtime.quantize.model_outline import LayerOutline, ModelOutline, outline_of
from millstream_runtime.quantize.output.safetensors_file import ELEMENT_BYTES, TensorInFile, tensors_of

QUANTIZATION_FIELDS = ("quantization_config", "compression_config")


@dataclass(frozen=True, slots=True)
class SourceModel:
    """`values`: config.json as it is. `tensors`: every tensor that the model needs, by name."""

    folder: Path
    values: dict[str, Any]
    config: ModelConfig
    outline: ModelOutline
    tensors: dict[str, TensorInFile]

    @classmethod
    def open(cls, folder: Path) -> SourceModel:
        """Read config.json and the header of each file.

        Raises:
            RuntimeFailure: the folder has no model, a damaged one, one that is quantized already, or one with images.
        """
        if not folder.is_dir():
            load_model_config(folder)  # refuses it
        if read_gguf_folder(folder) is not None:
            raise InvalidConfigError(f"{folder} has a GGUF file; give the checkpoint of 16 bits as *.safetensors.")
        fields = Fields(folder / "config.json")
        for name in QUANTIZATION_FIELDS:
            found = fields.get(name)
            if found:
                method = found.get("quant_method", "unknown") if isinstance(found, dict) else found
                raise InvalidConfigError(
                    f"{folder} is quantized already ({name}.quant_method: {method!s:.40}); give the checkpoint of 16 "
                    "bits that it was made from."
                )
        config = _text_config(folder, fields)
        outline = outline_of(config)
        expected = outline.expected
        with Checkpoint(folder) as checkpoint:
            _refuse_head(folder, fields, checkpoint)
            checkpoint.check(expected.expected.items(), expected.dtypes, expected.optional, expected.squeezable)
            refuse_unread(checkpoint, expected.expected, config)
        by_file = {path: tensors_of(path) for path in safetensors_files(folder)}
        file_of = file_of_each(by_file)
        tensors = {name: by_file[file_of[name]][name] for name in expected.expected if name in file_of}
        return cls(folder, dict(fields.values), config, outline, tensors)

    @property
    def element_bytes(self) -> dict[str, int]:
        """Of each tensor."""
        return {name: ELEMENT_BYTES[one.dtype] for name, one in self.tensors.items()}

    def config_for(self, num_tokens: int) -> ModelConfig:
        """The configuration for sequences of at most that length."""
        return replace(self.config, max_model_len=num_tokens)

    def load(self, name: str) -> Tensor:
        """One tensor in the file's dtype. Raises RuntimeFailure: CheckpointInvalid, it holds NaN or infinity."""
        tensor = self.tensors[name].load()
        check_finite(name, tensor)
        return tensor

    def load_layer(self, layer: LayerOutline) -> dict[str, Tensor]:
        """All tensors of a layer, float32."""
        return {name: self.load(name).float() for name in layer.tensors if name in self.tensors}


def _text_config(folder: Path, fields: Fields) -> ModelConfig:
    """Raises RuntimeFailure: the model has images, or its config.json is no model's."""
    try:
        if architecture_of(fields) in WITH_VISION:
            raise InvalidConfigError(
                f"{folder} has a vision tower ({architecture_of(fields)}); this version quantizes text models only."
            )
        return load_model_config(folder)
    except RuntimeFailure:
        # Not every head's config.json is that of a model: Medusa's names no architecture.
        if any(folder.glob("*.safetensors")):
            with Checkpoint(folder) as checkpoint:
                _refuse_head(folder, fields, checkpoint)
        raise


def _refuse_head(folder: Path, fields: Fields, checkpoint: Checkpoint) -> None:
    if (kind := head_kind(fields.values, checkpoint.names)) is not None:
        raise InvalidConfigError(
            f"{folder} is a draft head ({kind}); this version quantizes and tunes whole models only."
        )
