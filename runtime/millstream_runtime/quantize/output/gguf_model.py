"""A GGUF file from the layers that were made: names and rows in llama.cpp's order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from millstream_runtime.gguf.block_types import BLOCK_TYPES, BlockType
from millstream_runtime.gguf.config_values import ARCHITECTURES
from millstream_runtime.gguf.tensor_names import llama_cpp_name
from millstream_runtime.quantize.output.gguf_file import TensorToWrite, write_gguf_file
from millstream_runtime.quantize.output.gguf_metadata import (
    ARCHITECTURE_OF,
    model_fields,
    rope_factors,
    vocabulary_fields,
)
from millstream_runtime.quantize.output.gguf_packing import GgufPacking
from millstream_runtime.quantize.output.safetensors_file import TensorInFile
from millstream_runtime.quantize.source_model import SourceModel

FLOATS = {"F32": BLOCK_TYPES["F32"], "F16": BLOCK_TYPES["F16"], "BF16": BLOCK_TYPES["BF16"]}
NO_VOCABULARY = {"tokenizer.ggml.model": "no_vocab"}


def write_gguf_model(
    path: Path,
    source: SourceModel,
    packing: GgufPacking,
    tensors: Mapping[str, TensorInFile],
    say: Callable[[str], None],
) -> None:
    """Write the file.

    Args:
        source: the model that it is made from.
        tensors: by their names in a Hugging Face checkpoint; those of U8 are blocks `[out, bytes of a row]`.
        say: shows one sentence, where other programs could not use the vocabulary.

    Raises:
        OSError: it cannot be written.
        RuntimeFailure: CheckpointInvalid, the tokenizer cannot be read.
    """
    arch, config = ARCHITECTURE_OF[source.values["model_type"]], source.config
    vocabulary = vocabulary_fields(source.folder, source.values, config.vocab_size)
    if vocabulary is None:
        say(
            "the GGUF file has no vocabulary, because llama.cpp has no name for this model's tokenizer: programs that "
            "read tokenizer.json next to the file can use it"
        )
    metadata = model_fields(arch, config, packing.type_name, source.folder.name) | (vocabulary or NO_VOCABULARY)
    is_permuted = ARCHITECTURES[arch].permuted
    heads_of = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads} if is_permuted else {}
    found = [_tensor(name, one, heads_of, packing.kind) for name, one in tensors.items()]
    if factors := rope_factors(config):
        data = torch.tensor(factors).numpy().tobytes()
        found.append(TensorToWrite("rope_freqs.weight", (len(factors),), FLOATS["F32"], lambda: [data]))
    write_gguf_file(path, metadata, found)


def _tensor(name: str, one: TensorInFile, heads_of: Mapping[str, int], kind: BlockType) -> TensorToWrite:
    target = llama_cpp_name(name)
    order = _order(one.shape[0], heads_of.get(name.split(".")[-2]))
    if one.dtype == "U8":
        shape = (one.shape[0], one.shape[1] // kind.block_bytes * kind.block_elements)
        return TensorToWrite(target, shape, kind, lambda: _rows(one, order, None))
    if len(one.shape) == 1:  # llama.cpp computes with norms and biases in float32
        return TensorToWrite(target, one.shape, FLOATS["F32"], lambda: _rows(one, order, torch.float32))
    return TensorToWrite(target, one.shape, FLOATS[one.dtype], lambda: _rows(one, order, None))


def _rows(one: TensorInFile, order: torch.Tensor | None, dtype: torch.dtype | None) -> Iterable[bytes | memoryview]:
    if order is None and dtype is None:
        return one.chunks()
    tensor = one.load() if order is None else one.load().index_select(0, order)
    tensor = tensor if dtype is None else tensor.to(dtype)
    return [tensor.contiguous().view(-1).view(torch.uint8).numpy().data]


def _order(num_rows: int, heads: int | None) -> torch.Tensor | None:
    """For each row of the file its row in Hugging Face's order; None where they are the same.

    Rows i and i + half of a head become 2i and 2i + 1, as llama.cpp's `llama` turns them. `heads`: of rows that turn.
    """
    return None if heads is None else torch.arange(num_rows).view(heads, 2, -1).transpose(1, 2).flatten()
