"""The header of a GGUF file in an inspection, and its check after a download."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millstream_runtime.gguf.gguf_model import GgufModel, gguf_model
from millstream_runtime.gguf.header import GgufHeader, Read, parse_gguf
from millstream_runtime.gguf.tokenizer_files import tokenizer_config
from millstream_runtime.sources.safetensors_header import WeightsSummary


def gguf_header_bytes(read: Read, file_bytes: int, where: str) -> bytes:
    """What comes before the tensors, checked. Raises RuntimeFailure: CheckpointInvalid, or what `read` raises."""
    parts: list[bytes] = []

    def recorded(size: int) -> bytes:
        parts.append(read(size))
        return parts[-1]

    header = parse_gguf(recorded, file_bytes, where)
    return b"".join(parts)[: header.num_bytes]


def describe_gguf(headers: Mapping[str, tuple[bytes, int]]) -> tuple[dict[str, bytes], WeightsSummary]:
    """JSON files of the model in GGUF files, and what is counted. `headers`: bytes, and the size of the whole file."""
    parsed = {name: parse_gguf(io.BytesIO(text).read, size, name) for name, (text, size) in headers.items()}
    model = gguf_model({Path(name): header for name, header in parsed.items()})
    files = {"config.json": _json(model.config(is_header_alone=True)), "tokenizer_config.json": _tokenizer(model)}
    summary = WeightsSummary(is_gguf=True)
    for name, header in parsed.items():
        _add(summary, header, headers[name][1])
    summary.names |= model.tensors.keys()
    return files, summary


def _add(summary: WeightsSummary, header: GgufHeader, file_bytes: int) -> None:
    summary.files += 1
    summary.file_bytes += file_bytes
    for one in header.tensors.values():
        summary.tensors += 1
        summary.tensor_bytes += one.num_bytes
        summary.elements_by_dtype[one.type.name] += one.num_elements


def _tokenizer(model: GgufModel) -> bytes:
    return _json(tokenizer_config(model.header.metadata, model.header.where))


def _json(values: dict[str, Any]) -> bytes:
    return json.dumps(values).encode()
