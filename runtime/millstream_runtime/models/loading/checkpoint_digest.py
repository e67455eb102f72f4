"""A digest that tells checkpoints apart, without reading all of their weights.

A folder that was fetched has the SHA-256 of every file in its marker, so the same model has the same digest on every
machine. Of any other folder the digest takes names, sizes, times of change and samples: a copy of it may count as
another checkpoint, which costs a shared prefix and nothing else.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from millstream_runtime.gguf.gguf_model import gguf_files_in
from millstream_runtime.sources.folder import ModelFolder

SAMPLES = 64  # of one file, evenly spread, so that they fall into many of its tensors
SAMPLE_BYTES = 4096


def checkpoint_digest(folder: Path, *, with_times: bool = True) -> bytes:
    """Return 32 bytes, of config.json and of the weights. Files that cannot be read are an OSError.

    `with_times`: False leaves the times of change out, for two readings of one folder during a run.
    """
    digest = hashlib.sha256(b"millstream checkpoint\0")
    gguf = gguf_files_in(folder)  # they hold their own config
    if not gguf:
        _add(digest, (folder / "config.json").read_bytes())
    marker = ModelFolder(folder).marker()
    if marker is not None:
        _add(digest, json.dumps(sorted(marker.files.items())).encode())
    # What is no file, such as a link to nothing, is no weights: if they were loaded from it, that has failed before.
    for path in gguf or sorted(path for path in folder.glob("*.safetensors") if path.is_file()):
        status = path.stat()
        _add(digest, f"{path.name}\0{status.st_size}".encode())
        if marker is None and with_times:
            _add(digest, str(status.st_mtime_ns).encode())
        for sample in samples_of(path, status.st_size):
            _add(digest, sample)
    return digest.digest()


def samples_of(path: Path, size_bytes: int) -> list[bytes]:
    """Return the whole file where it is small; else its beginning, with the header, and pieces up to its end."""
    step = max(SAMPLE_BYTES, (size_bytes - SAMPLE_BYTES) // (SAMPLES - 1))
    samples = []
    with path.open("rb") as file:
        for start in range(0, size_bytes, step):
            file.seek(start)
            samples.append(file.read(SAMPLE_BYTES))
    return samples


def _add(digest: hashlib._Hash, part: bytes) -> None:
    """With its length, so that no two lists of parts are the same bytes."""
    digest.update(len(part).to_bytes(8, "little") + part)
