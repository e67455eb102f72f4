"""`inspect`: the shape of a model without its weights.

    hub, artifact    the JSON files whole, the first bytes of each *.safetensors or *.gguf by Range
    image            one pass over each layer; Range skips through a plain tar, a compressed one is read whole
    folder           the same from disk
    config.json      alone, where the model cannot be read

Nothing is stored. The result is what `shape.describe` documents.
"""

from __future__ import annotations

import tarfile
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from millstream_runtime.errors import FailureReason, InvalidConfigError, RuntimeFailure
from millstream_runtime.gguf.gguf_model import gguf_files_left_out
from millstream_runtime.quantization_config.modelopt import MODELOPT_NAME
from millstream_runtime.sources.client import TransferError
from millstream_runtime.sources.inspection.gguf_summary import describe_gguf, gguf_header_bytes
from millstream_runtime.sources.inspection.remote_reader import RemoteReader
from millstream_runtime.sources.inspection.shape import describe
from millstream_runtime.sources.layers import (
    EXPANSION_FLOOR_BYTES,
    GZIP_MAGIC,
    MAX_EXPANSION,
    ByteSource,
    ForwardReader,
    LayerContent,
    apply_layers,
    decompressed,
    model_folder_of,
    walk,
)
from millstream_runtime.sources.safetensors_header import LENGTH_BYTES, WeightsSummary, header_length, parse_header
from millstream_runtime.sources.selection import (
    CONFIG_NAME,
    GGUF_SUFFIX,
    INDEX_NAME,
    invalid,
    is_weights_file,
    support_files,
    weights_files,
)
from millstream_runtime.sources.source import ImageLayer, ResolvedSource, Source
from millstream_runtime.sources.transfer import Hashes, RemoteFile

READ_NAMES = (
    *("config.json", "generation_config.json", "tokenizer_config.json", MODELOPT_NAME),
    *("chat_template.jinja", "chat_template.json"),
)
SMALL_LIMIT_BYTES = 16 << 20
INDEX_LIMIT_BYTES = 64 << 20
HEADER_WINDOW_BYTES = 128 << 10  # most headers come with the first request
PIECE_BYTES = 1 << 20
PARALLEL = 8


@dataclass(frozen=True, slots=True)
class Header:
    """The JSON at the beginning of a safetensors file, or all before the tensors of a GGUF file; its whole size."""

    text: bytes
    file_bytes: int


class ModelFiles(Protocol):
    """A model's files by name, local or remote."""

    @property
    def names(self) -> Collection[str]: ...

    def read(self, name: str, limit_bytes: int) -> bytes:
        """A small file, whole."""

    def header(self, name: str) -> Header:
        """The beginning of a file of weights."""


@dataclass(frozen=True, slots=True)
class GivenConfig:
    """A config.json that replaces the model's own. `path`: as it was given, for messages."""

    path: Path
    text: bytes


def inspect_source(source: Source, config: GivenConfig | None = None) -> dict[str, Any]:
    """The shape of a hub repository, image or artifact. Raises RuntimeFailure."""
    resolved = source.resolve()
    files = RemoteModelFiles(source, resolved)
    return _inspect(files, str(source), source.identity, (source.requested_revision, resolved.revision), config)


def inspect_folder(folder: Path, config: GivenConfig | None = None) -> dict[str, Any]:
    """The shape of a folder. Raises RuntimeFailure: CheckpointInvalid."""
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        raise invalid(f"The model folder {folder} {problem}; name a folder with config.json and *.safetensors.")
    return _inspect(FolderFiles(folder), str(folder), {"kind": "path", "path": str(folder)}, (None, None), config)


def inspect_config(config: GivenConfig) -> dict[str, Any]:
    """The shape from a config.json alone, where the model itself cannot be read: no weights are counted."""
    identity = {"kind": "config", "path": str(config.path)}
    return describe(identity, None, None, {CONFIG_NAME: config.text}, WeightsSummary(), str(config.path))


def read_config(path: Path) -> GivenConfig:
    """Read a config.json that replaces the model's own. Raises RuntimeFailure: InvalidConfig or CheckpointInvalid."""
    try:
        with path.open("rb") as file:
            return GivenConfig(path, _capped(file.read(SMALL_LIMIT_BYTES + 1), str(path), SMALL_LIMIT_BYTES))
    except OSError as error:
        raise InvalidConfigError(f"--config {path} cannot be read: {error.strerror}.") from None


def _inspect(
    model: ModelFiles,
    where: str,
    identity: Mapping[str, str],
    revisions: tuple[str | None, str | None],
    config: GivenConfig | None,
) -> dict[str, Any]:
    """`revisions`: requested, and resolved."""
    requested_revision, revision = revisions
    support = support_files(model.names, where)
    own = [name for name in READ_NAMES if name in support and not (config is not None and name == CONFIG_NAME)]
    files = {name: model.read(name, SMALL_LIMIT_BYTES) for name in own}
    if config is not None:
        files[CONFIG_NAME] = config.text
    index = model.read(INDEX_NAME, INDEX_LIMIT_BYTES) if INDEX_NAME in support else None
    weights = weights_files(model.names, index, where)
    summary = WeightsSummary()
    with ThreadPoolExecutor(PARALLEL) as threads:
        headers = dict(zip(weights, threads.map(model.header, weights), strict=True))
    if weights[0].endswith(GGUF_SUFFIX):
        described, summary = describe_gguf({name: (one.text, one.file_bytes) for name, one in headers.items()})
        files = described | ({} if config is None else {CONFIG_NAME: config.text})
    else:
        for name, header in headers.items():
            summary.add(parse_header(header.text, name), len(header.text), header.file_bytes, name)
    summary.gguf_left_out = tuple(gguf_files_left_out(model.names))
    config_name = CONFIG_NAME if config is None else str(config.path)
    return describe(identity, requested_revision, revision, files, summary, config_name)


class FolderFiles:
    """Files on disk. Links are followed: a Hugging Face cache consists of links, and only JSON leaves this process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            self.names: Collection[str] = {path.name for path in folder.iterdir() if path.is_file()}
        except OSError as error:
            raise invalid(f"{folder} cannot be read: {error.strerror}.") from None

    def read(self, name: str, limit_bytes: int) -> bytes:
        try:
            with (self._folder / name).open("rb") as file:
                data = file.read(limit_bytes + 1)
        except OSError as error:
            raise invalid(f"{self._folder / name} cannot be read: {error.strerror}.") from None
        return _capped(data, name, limit_bytes)

    def header(self, name: str) -> Header:
        path = self._folder / name
        try:
            with path.open("rb") as file:
                return read_header(file, path.stat().st_size, name)
        except OSError as error:
            raise invalid(f"{path} cannot be read: {error.strerror}.") from None


class RemoteModelFiles:
    """Files of a resolved source; layers are read on construction."""

    def __init__(self, source: Source, resolved: ResolvedSource) -> None:
        self._source = source
        self._files = resolved.files
        layers = [self._read_layer(layer) for layer in resolved.layers]
        self._layered = model_folder_of(apply_layers(layers), str(source))
        self.names: Collection[str] = {*resolved.files, *resolved.others, *self._layered}

    def read(self, name: str, limit_bytes: int) -> bytes:
        if name in self._layered:
            return _capped(self._layered[name].text, name, limit_bytes)
        file = self._files[name]
        if file.size_bytes > limit_bytes:
            raise _too_large(name, limit_bytes)
        try:
            data, _ = self._source.client.get(file.url, file.size_bytes)
        except TransferError as error:
            raise self._source.explain(error, name) from None
        hashes = Hashes(file.size_bytes, file.digest)
        hashes.update(data)
        if len(data) != file.size_bytes or not hashes.match():
            raise RuntimeFailure(
                FailureReason.DOWNLOAD_FAILED,
                f"{name} of {self._source} does not have the digest that its source promised.",
            )
        return data

    def header(self, name: str) -> Header:
        if name in self._layered:
            return self._layered[name]
        file = self._files[name]
        try:
            with RemoteReader(self._source.client, file, HEADER_WINDOW_BYTES) as reader:
                return read_header(reader, file.size_bytes, name)
        except TransferError as error:
            raise self._source.explain(error, name) from None

    def _read_layer(self, layer: ImageLayer) -> LayerContent[Header]:
        where = f"{self._source}, {layer.blob.name}"
        try:
            magic = self._first_bytes(layer.blob)
            with RemoteReader(self._source.client, layer.blob) as reader, decompressed(reader, magic, where) as source:
                limit_bytes = EXPANSION_FLOOR_BYTES + MAX_EXPANSION * layer.blob.size_bytes
                skip_to = None if magic.startswith(GZIP_MAGIC) else reader.seek
                return walk(ForwardReader(source, limit_bytes, where, skip_to), layer.root, where, _read_member)
        except TransferError as error:
            raise self._source.explain(error, layer.blob.name) from None

    def _first_bytes(self, blob: RemoteFile) -> bytes:
        with RemoteReader(self._source.client, blob, 4) as reader:
            return reader.read(4)


def read_header(source: ByteSource, file_bytes: int, where: str) -> Header:
    """By the name of the file. Raises RuntimeFailure: CheckpointInvalid, or what `source.read` raises."""
    if where.endswith(GGUF_SUFFIX):
        return Header(gguf_header_bytes(source.read, file_bytes, where), file_bytes)
    first = source.read(min(file_bytes, LENGTH_BYTES + 24))  # 24 more: enough to know a git-lfs pointer
    length = header_length(first, file_bytes, where)
    parts = [first[LENGTH_BYTES:][:length]]
    missing = length - len(parts[0])
    while missing > 0 and (data := source.read(min(PIECE_BYTES, missing))):
        parts.append(data)
        missing -= len(data)
    if missing:
        raise invalid(f"{where} ends in the middle of its safetensors header.")
    return Header(b"".join(parts), file_bytes)


def _read_member(tar: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> Header:
    """The header of a weights file, or all of a small JSON file; other files are only recorded as present."""
    source = tar.extractfile(member)
    assert source is not None  # noqa: S101 - a regular file
    name = Path(path).name
    if is_weights_file(name):
        return read_header(source, member.size, name)
    if name not in (*READ_NAMES, INDEX_NAME):
        return Header(b"", member.size)
    limit_bytes = INDEX_LIMIT_BYTES if name == INDEX_NAME else SMALL_LIMIT_BYTES
    if member.size > limit_bytes:
        raise _too_large(name, limit_bytes)
    parts = []
    while data := source.read(PIECE_BYTES):
        parts.append(data)
    return Header(b"".join(parts), member.size)


def _capped(data: bytes, name: str, limit_bytes: int) -> bytes:
    if len(data) > limit_bytes:
        raise _too_large(name, limit_bytes)
    return data


def _too_large(name: str, limit_bytes: int) -> RuntimeFailure:
    return invalid(f"{name} is larger than the {limit_bytes} bytes that are read of it.")
