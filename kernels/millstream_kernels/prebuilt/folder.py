"""A folder of compiled kernels, read-only in an image. Readable without torch and triton.

    index.json     format, Triton's version, one entry per variant and GPU: what it is, and the SHA-256 of its files
    <key>.cubin    machine code
    <key>.json     what Triton says of it: shared memory, warps

The folder names no path, so it can lie anywhere. Every file is compared with its hash before it is used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
INDEX = "index.json"
MAX_INDEX_BYTES = 16 << 20
MAX_FILE_BYTES = 16 << 20


class PrebuiltError(Exception):
    """A folder or an entry that cannot be used. The message names it and says why."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One compiled variant for one GPU."""

    key: str  # `key.entry_key`
    kernel: str
    variant: str
    capability: int  # that it was compiled for, 80 for sm_80
    arguments: Mapping[str, str]  # types of the arguments at run time
    constants: Mapping[str, str]  # values, as text
    aligned: tuple[str, ...]  # arguments that are multiples of 16
    num_warps: int
    num_stages: int
    cubin_sha256: str
    metadata_sha256: str

    def __str__(self) -> str:
        return f"{self.kernel} {self.variant} for sm_{self.capability}"


@dataclass(frozen=True, slots=True)
class Files:
    """An entry's files, compared with their hashes."""

    cubin: Path
    metadata: Path


class PrebuiltFolder:
    """The entries of a folder, by their keys."""

    def __init__(self, path: Path, triton_version: str, entries: Iterable[Entry]) -> None:
        self.path = path
        self.triton_version = triton_version
        self.entries = {entry.key: entry for entry in entries}

    @staticmethod
    def open(path: Path) -> PrebuiltFolder:
        """Read the index.

        Raises:
            PrebuiltError: there is none, or it is not one of ours.
        """
        index = path / INDEX
        try:
            text = _read(index, MAX_INDEX_BYTES)
            content = json.loads(text)
            if content["format"] != FORMAT:
                raise PrebuiltError(f"{index} has format {content['format']!r}; this runtime reads {FORMAT}")
            entries = [Entry(**{**fields, "aligned": tuple(fields["aligned"])}) for fields in content["entries"]]
            return PrebuiltFolder(path, str(content["triton"]), entries)
        except OSError as error:
            raise PrebuiltError(f"{index}: {error.strerror or error}") from None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise PrebuiltError(f"{index} is damaged: {error}") from None

    def files(self, entry: Entry) -> Files:
        """Where the entry's files are.

        Raises:
            PrebuiltError: one is missing, or is not what the index says.
        """
        found = Files(self.path / f"{entry.key}.cubin", self.path / f"{entry.key}.json")
        for path, expected in ((found.cubin, entry.cubin_sha256), (found.metadata, entry.metadata_sha256)):
            try:
                content = _read(path, MAX_FILE_BYTES)
            except OSError as error:
                raise PrebuiltError(f"{entry}: {path}: {error.strerror or error}") from None
            if hashlib.sha256(content).hexdigest() != expected:
                raise PrebuiltError(f"{entry}: {path} is damaged: its SHA-256 is not the one in {INDEX}")
        return found


def index_bytes(triton_version: str, entries: Iterable[Entry]) -> bytes:
    """The content of `index.json`."""
    listed = [asdict(entry) for entry in sorted(entries, key=lambda entry: (str(entry), entry.key))]
    content: dict[str, Any] = {"format": FORMAT, "triton": triton_version, "entries": listed}
    return json.dumps(content, indent=1, sort_keys=True).encode() + b"\n"


def _read(path: Path, limit_bytes: int) -> bytes:
    with path.open("rb") as file:
        content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise PrebuiltError(f"{path} has more than {limit_bytes} bytes")
    return content
