"""GGUF files -> tensors, by the names and in the order of rows of a Hugging Face checkpoint.

    model.layers.0.mlp.up_proj.weight    floats: as stored, or dequantized to float32
    model.layers.0.mlp.up_proj.blocks    in the file's blocks, uint8 [out, bytes of a row]; see quantization/gguf.py

Two things are put back: llama.cpp's `llama` has the rows of queries and keys in pairs, as its rotary embedding turns
them, where Hugging Face has two halves; and Gemma's norms have one added to their weights.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from millstream_runtime.gguf.block_types import BlockType
from millstream_runtime.gguf.config_values import ARCHITECTURES
from millstream_runtime.gguf.gguf_model import GgufModel, StoredGgufTensor
from millstream_runtime.models.loading.tensor_store import DescribedTensor, TensorStore
from millstream_runtime.quantization.gguf_blocks import dequantized, scales_are_finite
from millstream_runtime.quantization.quantized_layout import invalid_tensor

BLOCKS, WEIGHT = ".blocks", ".weight"
TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BLOCKS_AT_ONCE = 4096
HEADS_OF = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}


class GgufCheckpoint(TensorStore):
    """One GGUF model. Files are memory-mapped."""

    def __init__(self, folder: Path, model: GgufModel) -> None:
        super().__init__(folder)
        self._model = model
        self._files = {path: _mapped(path) for path in {one.path for one in model.tensors.values()}}
        known = ARCHITECTURES[model.architecture]
        self._is_permuted, self._has_norms_plus_one = known.permuted, known.model_type.startswith("gemma")
        values = model.config()
        self._heads = {name: int(values[field]) for name, field in HEADS_OF.items()}
        self.num_skipped = 0  # of what is left out, the metadata tells all
        self.bytes_read = 0

    def close(self) -> None:
        self._files.clear()

    @property
    def names(self) -> frozenset[str]:
        """llama.cpp's name of what has none in a checkpoint of Hugging Face."""
        return frozenset((*self._model.tensors, *self._model.unnamed))

    def path_of(self, name: str) -> Path:
        return self._model.unnamed[name] if name in self._model.unnamed else self._model.tensors[name].path

    def described(self, name: str) -> DescribedTensor | None:
        found = self._stored(name)
        if found is None:
            return None
        tensor, shape = found.tensor, found.tensor.shape
        if not name.endswith(BLOCKS):
            return DescribedTensor(found.path, shape, "F32" if tensor.type.is_quantized else tensor.type.name)
        if not tensor.type.is_quantized:
            return None
        return DescribedTensor(found.path, (*shape[:-1], tensor.type.row_bytes(shape[-1])), "U8")

    def read(self, name: str) -> Tensor:
        return self._read(name, None)

    def read_cut(self, name: str, ranges: Sequence[tuple[range, ...]]) -> Tensor:
        rows = torch.cat([torch.arange(one.start, one.stop) for one in ranges[0]])
        tensor = self._read(name, rows)
        for dimension, kept in enumerate(ranges[1:], start=1):
            if [(one.start, one.stop) for one in kept] != [(0, tensor.shape[dimension])]:
                columns = torch.cat([torch.arange(one.start, one.stop) for one in kept])
                tensor = tensor.index_select(dimension, columns)
        return tensor

    def _stored(self, name: str) -> StoredGgufTensor | None:
        stem = name.removesuffix(BLOCKS)
        return self._model.tensors.get(name if stem == name else f"{stem}{WEIGHT}")

    def _read(self, name: str, kept: Tensor | None) -> Tensor:
        """Rows `kept` in the order of Hugging Face; None: all."""
        found = self._stored(name)
        assert found is not None  # noqa: S101 - `check` has seen it
        tensor = found.tensor
        raw = self._files[found.path][tensor.offset_bytes : tensor.offset_bytes + tensor.num_bytes]
        rows = raw.view(tensor.shape[0], -1)
        order = self._order(name, tensor.shape[0])
        if kept is not None:
            order = kept if order is None else order[kept]
        if order is not None:
            rows = rows.index_select(0, order)
        self.bytes_read += rows.numel()
        if name.endswith(BLOCKS):
            return rows
        shape = (len(rows), *tensor.shape[1:])
        if not tensor.type.is_quantized:
            values = rows.contiguous().view(TORCH_DTYPES[tensor.type.name]).view(shape)
        else:
            blocks = rows.reshape(-1, tensor.type.block_bytes)
            if not scales_are_finite(blocks, tensor.type):
                raise invalid_tensor(name, f"({tensor.type.name}) holds NaN or infinite scales")
            values = _in_pieces(blocks, tensor.type).view(shape)
        is_norm = name.endswith("norm.weight")
        return values.float() - 1 if is_norm and self._has_norms_plus_one else values

    def _order(self, name: str, num_rows: int) -> Tensor | None:
        """For each row of Hugging Face its row in the file; None where they are the same.

        Rows 2i and 2i + 1 of a head in the file are rows i and i + half of it.
        """
        part = name.split(".")[-2]
        if not self._is_permuted or part not in self._heads or num_rows % (2 * self._heads[part]):
            return None
        pairs = torch.arange(num_rows).view(self._heads[part], -1, 2)
        return pairs.transpose(1, 2).flatten()


def _in_pieces(blocks: Tensor, kind: BlockType) -> Tensor:
    """`[n, block_elements]`: an embedding at once would take several times its float32 size."""
    values = torch.empty(len(blocks), kind.block_elements)
    for first in range(0, len(blocks), BLOCKS_AT_ONCE):
        values[first : first + BLOCKS_AT_ONCE] = dequantized(blocks[first : first + BLOCKS_AT_ONCE], kind)
    return values


def _mapped(path: Path) -> Tensor:
    """A file's bytes, read-only; a page is read when it is looked at, and none of it counts as memory of ours."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a buffer that nothing may write to; nothing does
        return torch.frombuffer(mapped, dtype=torch.uint8)
