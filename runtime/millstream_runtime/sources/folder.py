"""A model folder: complete, marked and then never changed; or incomplete and unmarked.

    config.json  model-00001-of-00002.safetensors  …      appear by rename, each already verified
    .millstream-complete.json                             appears last: source, revision, files, sizes, digests
    .millstream-partial/                                  downloads in progress; removed when the folder is complete
    .millstream-lock                                      see lock.py

The folder itself may be a mount point, which cannot be renamed: so its files are, and the marker is what counts.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream_runtime.errors import FailureReason, InvalidConfigError, RuntimeFailure
from millstream_runtime.sources.selection import TEMPLATE_FOLDER, is_support_file, is_weights_file
from millstream_runtime.sources.transfer import LocalFile, RemoteFile, disk_failure, verified

MARKER_NAME = ".millstream-complete.json"
PARTIAL_NAME = ".millstream-partial"
MARKER_VERSION = 1
MARKER_LIMIT_BYTES = 8 << 20
SPARE_BYTES = 64 << 20  # for the file system's metadata, in addition to the files

FreeSpace = Callable[[Path], int]


@dataclass(frozen=True, slots=True)
class Marker:
    """The description of a complete folder. `files`: name -> (bytes, SHA-256 in hex)."""

    source: Mapping[str, str]
    requested_revision: str
    revision: str
    files: Mapping[str, tuple[int, str]]

    @property
    def total_bytes(self) -> int:
        return sum(size_bytes for size_bytes, _ in self.files.values())

    def matches(self, source: Mapping[str, str], requested_revision: str) -> bool:
        """Whether this is the requested model; a branch that has moved since does not matter."""
        return dict(self.source) == dict(source) and requested_revision in (self.requested_revision, self.revision)

    def as_json(self) -> dict[str, Any]:
        return {
            "version": MARKER_VERSION,
            "source": dict(self.source),
            "requested_revision": self.requested_revision,
            "revision": self.revision,
            "total_bytes": self.total_bytes,
            "files": [
                {"name": name, "size_bytes": size_bytes, "digest": f"sha256:{sha256}"}
                for name, (size_bytes, sha256) in sorted(self.files.items())
            ],
        }

    @staticmethod
    def of(value: Any) -> Marker:
        """Raises KeyError, TypeError, ValueError, AttributeError: not a marker that we wrote."""
        if value["version"] != MARKER_VERSION:
            raise ValueError(f"version {value['version']!r}")
        files = {
            str(file["name"]): (int(file["size_bytes"]), str(file["digest"]).removeprefix("sha256:"))
            for file in value["files"]
        }
        if not all(is_support_file(name) or is_weights_file(name) for name in files):
            raise ValueError("a file name that no model has")
        source = {str(key): str(part) for key, part in value["source"].items()}
        return Marker(source, str(value["requested_revision"]), str(value["revision"]), files)


def free_bytes(folder: Path) -> int:
    """What an ordinary user may still write to the file system of `folder`."""
    facts = os.statvfs(folder)
    return facts.f_bavail * facts.f_frsize


class ModelFolder:
    """One folder on disk. Tests replace `free_space`."""

    def __init__(self, path: Path, free_space: FreeSpace = free_bytes) -> None:
        self.path = path
        self.partial = path / PARTIAL_NAME
        self._free_space = free_space

    def marker(self) -> Marker | None:
        """The marker; None where there is none or it cannot be read."""
        try:
            with (self.path / MARKER_NAME).open("rb") as file:
                return Marker.of(json.loads(file.read(MARKER_LIMIT_BYTES)))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None

    def damaged(self, marker: Marker, *, read_all: bool) -> str | None:
        """The first file that differs from the marker; compares sizes only unless `read_all`."""
        for name, (size_bytes, sha256) in marker.files.items():
            path = self.path / name
            if self._has_link(path) or not path.is_file() or path.stat().st_size != size_bytes:
                return name
            if read_all and _sha256(path) != sha256:
                return name
        return None

    def prepare(self) -> None:
        """Make the folder and its place for partials. Raises RuntimeFailure: it cannot be written."""
        try:
            self.partial.mkdir(parents=True, exist_ok=True)
        except NotADirectoryError as error:
            raise InvalidConfigError(f"--into {self.path} is below a file; give a folder.") from error
        except FileExistsError as error:
            kind = "a link to nothing" if self.path.is_symlink() and not self.path.exists() else "a file"
            raise InvalidConfigError(f"--into {self.path} is {kind}; give a folder.") from error
        except OSError as error:
            raise disk_failure(error, self.path) from error

    def remove_marker(self) -> None:
        """Remove the marker, because the folder is about to change."""
        (self.path / MARKER_NAME).unlink(missing_ok=True)

    def require_space(self, size_bytes: int) -> None:
        """Raises RuntimeFailure: DiskFull, before the first byte."""
        free = self._free_space(self.path)
        if size_bytes + SPARE_BYTES > free:
            raise RuntimeFailure(
                FailureReason.DISK_FULL,
                f"{self.path} has {free / 1e9:.2f} GB free and {(size_bytes + SPARE_BYTES) / 1e9:.2f} GB are still "
                "needed; give the model cache a larger volume.",
            )

    def require_no_others(self, names: set[str]) -> None:
        """Raises InvalidConfigError: the folder has files of another model, which a server would read too."""
        templates = self.path / TEMPLATE_FOLDER
        paths = [*self.path.iterdir(), *(templates.iterdir() if templates.is_dir() else ())]
        present = [str(path.relative_to(self.path)) for path in paths]
        strangers = sorted(
            name for name in present if (is_support_file(name) or is_weights_file(name)) and name not in names
        )
        if strangers:
            raise InvalidConfigError(
                f"--into {self.path} holds {strangers[0]}, which is not part of this model; give an empty folder."
            )

    def adopt(self, file: RemoteFile) -> LocalFile | None:
        """Use a file that is here already with the right content: a run died between renames, or it was copied."""
        path = self.path / file.name
        if self._has_link(path) or not path.is_file() or file.digest is None:
            return None
        return verified(path, file)

    def _has_link(self, path: Path) -> bool:
        """Whether a file of the model, or a folder above it in the model, is a link: it may lead anywhere."""
        return any(part.is_symlink() for part in (path, *path.parents) if self.path in part.parents)

    def _make_template_folder(self) -> None:
        folder = self.path / TEMPLATE_FOLDER
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise InvalidConfigError(f"{folder} is a link or a file; the model has a folder there: remove it.")
        folder.mkdir(exist_ok=True)

    def discard(self, path: Path) -> None:
        """Delete a file that is wrong, and what else was unpacked from its layer, so that this is unpacked again."""
        path.unlink(missing_ok=True)
        if self.partial in path.parents and path.parent != self.partial:
            shutil.rmtree(self.partial / path.relative_to(self.partial).parts[0], ignore_errors=True)

    def publish(self, files: Mapping[str, LocalFile], marker: Marker) -> None:
        """Rename every file to its place, then write the marker.

        Raises:
            RuntimeFailure: the disk.
            InvalidConfigError: a link or a file is where the model has a folder.
        """
        try:
            if any("/" in name for name in files):
                self._make_template_folder()
            for name, file in files.items():
                if file.path != self.path / name:
                    file.path.replace(self.path / name)
            for folder in {(self.path / name).parent for name in files}:
                _sync(folder)
            _sync(self.path)
            draft = self.partial / MARKER_NAME
            with draft.open("w", encoding="utf-8") as output:
                json.dump(marker.as_json(), output, indent=1)
                output.flush()
                os.fsync(output.fileno())
            draft.replace(self.path / MARKER_NAME)
            _sync(self.path)
        except OSError as error:
            raise disk_failure(error, self.path) from error
        shutil.rmtree(self.partial, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Make renames in `folder` survive a crash of the node."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    nothing_promised = RemoteFile(path.name, "", path.stat().st_size, None)
    checked = verified(path, nothing_promised)
    return checked.sha256 if checked is not None else ""
