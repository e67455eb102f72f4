"""Container images written directly: one layer from a list of files, in the archive that `docker load` reads.

A static binary needs no Dockerfile and no build daemon. The bytes depend only on the inputs (fixed times and owners,
sorted names), so the same binary is the same image, digest for digest.

    manifest.json   [{"Config": "<sha>.json", "RepoTags": [...], "Layers": ["<sha>.tar"]}]
    <sha>.json      image configuration: architecture, entry point, diff id of the layer
    <sha>.tar       the layer
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Symlink:
    """A symbolic link inside the image."""

    target: str


Files = dict[str, Path | bytes | Symlink]  # absolute path in the image -> host file, literal bytes or a link
EMPTY_TMP: Files = {"/tmp/.keep": b""}  # noqa: S108  # a program may expect the folder; this one is in an image


@dataclass(frozen=True)
class ScratchImage:
    """An image of chosen files, named `reference`."""

    reference: str
    files: Files
    entrypoint: Sequence[str] = ()
    environment: Sequence[str] = ("PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",)
    labels: Mapping[str, str] = field(default_factory=dict)
    architecture: str = "amd64"

    def write(self, target: Path) -> None:
        """Write the archive to `target`."""
        layer = _layer(self.files)
        digest = hashlib.sha256(layer).hexdigest()
        config = json.dumps(self._config(digest), sort_keys=True).encode()
        config_name = hashlib.sha256(config).hexdigest() + ".json"
        manifest = [{"Config": config_name, "RepoTags": [self.reference], "Layers": [f"{digest}.tar"]}]
        with tarfile.open(target, "w") as archive:
            for name, data in (
                (config_name, config),
                (f"{digest}.tar", layer),
                ("manifest.json", json.dumps(manifest).encode()),
            ):
                archive.addfile(_entry(name, len(data), 0o644), io.BytesIO(data))

    def _config(self, layer_digest: str) -> dict[str, object]:
        return {
            "architecture": self.architecture,
            "os": "linux",
            "created": "1970-01-01T00:00:00Z",
            "config": {"Entrypoint": list(self.entrypoint), "Env": list(self.environment), "Labels": dict(self.labels)},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer_digest}"]},
        }


def _layer(files: Files) -> bytes:
    buffer = io.BytesIO()
    folders: set[str] = set()
    with tarfile.open(fileobj=buffer, mode="w") as layer:
        for path in sorted(files):
            for folder in _parents(path):
                if folder not in folders:
                    folders.add(folder)
                    # /tmp is world-writable with the sticky bit in every root file system
                    layer.addfile(_entry(folder, 0, 0o1777 if folder == "tmp" else 0o755, tarfile.DIRTYPE))
            _add(layer, path.lstrip("/"), files[path])
    return buffer.getvalue()


def _add(layer: tarfile.TarFile, name: str, source: Path | bytes | Symlink) -> None:
    if isinstance(source, Symlink):
        entry = _entry(name, 0, 0o777, tarfile.SYMTYPE)
        entry.linkname = source.target
        layer.addfile(entry)
    else:
        data = source if isinstance(source, bytes) else source.read_bytes()
        executable = isinstance(source, Path) and source.stat().st_mode & 0o111
        layer.addfile(_entry(name, len(data), 0o755 if executable else 0o644), io.BytesIO(data))


def _parents(path: str) -> list[str]:
    parts = path.strip("/").split("/")[:-1]
    return ["/".join(parts[: index + 1]) for index in range(len(parts))]


def _entry(name: str, size: int, mode: int, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.type = size, mode, kind
    return entry
