"""Digests of the model files that a comparison reads: what its verdict is about.

A large file is not read whole for it: its digest is of its size, its beginning (which has the header) and samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.model_output.companion_files import model_files
from millstream_runtime.models.loading.checkpoint_digest import samples_of

MAX_WHOLE_BYTES = 16 << 20
FILES_SHOWN = 3


@dataclass(frozen=True, slots=True, order=True)
class JudgedFile:
    """`is_whole`: the SHA-256 is of all bytes; otherwise of the size, the beginning and samples."""

    name: str
    size_bytes: int
    sha256: str
    is_whole: bool


def judged_files(folder: Path) -> tuple[JudgedFile, ...]:
    """Return the files of a model folder, by name.

    Raises:
        RuntimeFailure: CheckpointInvalid, one cannot be read.
    """
    try:
        return tuple(sorted(_judged_file(folder, path) for path in {*model_files(folder)} if path.is_file()))
    except OSError as error:
        raise RuntimeFailure(
            FailureReason.CHECKPOINT_INVALID,
            f"Cannot read {error.filename or folder}: {error.strerror}; judge the model again when the file is there.",
        ) from None


def require_unchanged(folder: Path, before: Sequence[JudgedFile]) -> None:
    """Raises RuntimeFailure: CheckpointInvalid, the files are not those of `before`."""
    changed = sorted({file.name for file in {*before} ^ {*judged_files(folder)}})
    if not changed:
        return
    more = f" and {len(changed) - FILES_SHOWN} more" if len(changed) > FILES_SHOWN else ""
    raise RuntimeFailure(
        FailureReason.CHECKPOINT_INVALID,
        f"{folder} was changed while it was judged ({', '.join(changed[:FILES_SHOWN])}{more}), so the figures would be "
        "of two models: there is no verdict. Judge it again when nothing writes into it.",
    )


def digest_of(files: Sequence[JudgedFile]) -> str:
    """Return one SHA-256 of all of them, hexadecimal."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.sha256} {file.size_bytes} {file.name}\n".encode())
    return digest.hexdigest()


def _judged_file(folder: Path, path: Path) -> JudgedFile:
    size_bytes, digest = path.stat().st_size, hashlib.sha256()
    is_whole = size_bytes <= MAX_WHOLE_BYTES
    if is_whole:
        digest.update(path.read_bytes())
    else:
        digest.update(size_bytes.to_bytes(8, "little"))
        for sample in samples_of(path, size_bytes):
            digest.update(sample)
    name = path.relative_to(folder).as_posix().encode(errors="backslashreplace").decode()  # it may be no UTF-8
    return JudgedFile(name, size_bytes, digest.hexdigest(), is_whole)
