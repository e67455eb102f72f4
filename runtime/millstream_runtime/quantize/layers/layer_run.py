"""Run one layer of a model on calibration sequences, as the engine runs it: its attention over a KV pool.

The pool has one tensor, since only one layer is computed, whatever its number is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from millstream_runtime.engine.attention.attention_chunk import AttentionChunk
from millstream_runtime.engine.attention.paged_attention import TorchAttention
from millstream_runtime.engine.kv.kv_cache import KVCache
from millstream_runtime.kv_layout import KVLayout
from millstream_runtime.models.config.model_config import ModelConfig
from millstream_runtime.models.registry import family_code
from millstream_runtime.quantize.layers.layer_weights import LayerWeights
from millstream_runtime.quantize.output.safetensors_file import TensorInFile

BLOCK_SIZE_TOKENS = 16
EMBEDDING = "model.embed_tokens."


@dataclass(slots=True)
class LargestInCache:
    """The largest magnitudes that a layer has stored in the KV pool. A latent (MLA) is key and value."""

    key: float = 0.0
    value: float = 0.0

    def add(self, heads: Tensor) -> None:
        """Count what is stored of some tokens: `[2 * KV, T, D]`, keys first, or `[1, T, D]`."""
        largest = heads.abs().amax(dim=(1, 2))
        num_keys = -(-len(largest) // 2)
        self.key = max(self.key, float(largest[:num_keys].max()))
        self.value = max(self.value, float(largest[-num_keys:].max()))


class LayerRun:
    """One layer. `config.max_model_len` bounds the sequences. `largest` counts their keys and values."""

    def __init__(
        self, config: ModelConfig, layer: int, weights: LayerWeights, largest: LargestInCache | None = None
    ) -> None:
        self._decoder = family_code(config.architecture).build(config, weights)
        self._layer, self._device = layer, weights.device
        self._num_blocks = -(-config.max_model_len // BLOCK_SIZE_TOKENS)
        layout = KVLayout((None,), (0,) * config.num_layers, (0,) * config.num_layers, 1)
        self._largest = largest
        self._cache = KVCache(config, self._num_blocks, BLOCK_SIZE_TOKENS, torch.float32, self._device, layout=layout)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the hidden states `[T, hidden]` of one sequence behind the layer; the argument may be changed."""
        residual = hidden.to(self._device)
        num_tokens = len(residual)
        slots = torch.arange(num_tokens, device=self._device)
        chunk = AttentionChunk(num_tokens, num_tokens, range(self._num_blocks), is_contiguous=True)
        positions = slots + self._decoder.config.rotary_offset(num_tokens)
        step = self._decoder.step(positions, TorchAttention(self._cache, slots, [chunk]))
        self._decoder.layers[self._layer](residual, step)
        if self._largest is not None:
            self._largest.add(self._cache.heads[self._layer][:, :num_tokens])
        return residual


def embed(config: ModelConfig, table: TensorInFile, sequences: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    """Yield the hidden states before the first layer, `[T, hidden]` of each sequence.

    `table`: `[vocab, hidden]`. Only the rows that are asked for are read.
    """
    used = sorted({token for one in sequences for token in one})
    place = {token: index for index, token in enumerate(used)}
    weights = LayerWeights(EMBEDDING, {f"{EMBEDDING}weight": table.load_rows(used).float()}, torch.device("cpu"))
    decoder = family_code(config.architecture).build(config, weights)
    for one in sequences:
        yield decoder.embed(torch.tensor([place[token] for token in one]))
