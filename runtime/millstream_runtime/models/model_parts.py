"""Parts of a model, loaded one at a time: the embedding, each layer, the final norm with the output head.

    parts = ModelParts(...)
    parts.embedding().embed(token_ids)
    parts.layer(0, 0).layers[0](residual, step)
    parts.head().logits(residual)

What is returned is a whole `Decoder`, of which everything but the part is on the meta device. Files are mapped while a
part is read, and no longer: their pages count as memory of the process.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from millstream_runtime.models.config.model_config import ModelConfig
from millstream_runtime.models.layers.decoder import Decoder
from millstream_runtime.models.loading.open_checkpoint import open_checkpoint
from millstream_runtime.models.loading.part_weights import IsWanted, PartWeights
from millstream_runtime.models.loading.staged_placement import placement_for
from millstream_runtime.models.loading.unread_tensors import refuse_unread
from millstream_runtime.models.loading.weights import ExpectedWeights
from millstream_runtime.models.registry import build_model, expected_weights, layouts_of, log_what_is_read

LAYER = re.compile(r"model\.layers\.(\d+)\.")
EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class PartBytes:
    """What the parts take on the device. `layer`: the largest one, `head`: with the final norm."""

    layer: int
    embedding: int
    head: int
    whole: int  # the model, loaded whole, without copies


class ModelParts:
    """The parts of the model of a folder."""

    def __init__(
        self,
        config: ModelConfig,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        *,
        may_round_activations: bool = True,
    ) -> None:
        """`may_round_activations`: as in `registry.load_model`."""
        self._may_round_activations = may_round_activations
        self._config, self._folder, self._dtype, self._device = config, folder, dtype, device
        self._layout_of = layouts_of(config)

    def check(self) -> None:
        """Check every tensor of the checkpoint, and log what of the folder is not read. Reads headers alone.

        Raises:
            RuntimeFailure: CheckpointInvalid, naming file and tensor.
        """
        wanted = expected_weights(self._config, self._dtype)
        with open_checkpoint(self._folder, is_tied=self._config.tie_word_embeddings) as checkpoint:
            checkpoint.check(
                wanted.expected.items(), wanted.dtypes, wanted.optional, wanted.squeezable, wanted.documents
            )
            refuse_unread(checkpoint, wanted.expected, self._config)
            log_what_is_read(self._config, self._folder, checkpoint.num_skipped)

    def embedding(self) -> Decoder:
        """Load what `Decoder.embed` takes."""
        return self._load(lambda name: name == EMBEDDING)

    def layer(self, number: int, copy_budget_bytes: int) -> Decoder:
        """Load one layer. `copy_budget_bytes`: as in `registry.load_model`, for this layer alone."""
        prefix = f"model.layers.{number}."
        return self._load(lambda name: name.startswith(prefix), copy_budget_bytes)

    def head(self) -> Decoder:
        """Load what `Decoder.logits` takes."""
        is_tied = self._config.tie_word_embeddings
        return self._load(lambda name: LAYER.match(name) is None and (is_tied or name != EMBEDDING))

    def _load(self, is_wanted: IsWanted, copy_budget_bytes: int = 0) -> Decoder:
        is_tied = self._config.tie_word_embeddings
        with open_checkpoint(self._folder, is_tied=is_tied) as checkpoint, placement_for(self._device) as placement:
            weights = PartWeights(
                checkpoint,
                self._dtype,
                self._device,
                is_wanted,
                copy_budget_bytes=copy_budget_bytes,
                layout_of=self._layout_of,
                placement=placement,
                may_round_activations=self._may_round_activations,
            )
            return build_model(self._config, weights, placement)


def part_bytes(config: ModelConfig, dtype: torch.dtype) -> PartBytes:
    """Return what the parts take, as far as config.json says. Layers share theirs by their numbers of weights.

    Raises:
        RuntimeFailure: as `registry.expected_weights`.
    """
    expected: ExpectedWeights = expected_weights(config, dtype)
    elements: dict[int, int] = {}
    embedding_bytes = head_bytes = 0
    for name, count in expected.reads:
        if (layer := LAYER.match(name)) is not None:
            number = int(layer.group(1))
            elements[number] = elements.get(number, 0) + count
        elif name == EMBEDDING:
            embedding_bytes += count * dtype.itemsize
        else:
            head_bytes += count * dtype.itemsize
    layers_bytes = expected.num_bytes - embedding_bytes - head_bytes
    largest_bytes = layers_bytes * max(elements.values()) // sum(elements.values())
    if config.tie_word_embeddings:
        head_bytes += embedding_bytes
    return PartBytes(largest_bytes, embedding_bytes, head_bytes, expected.num_bytes)
