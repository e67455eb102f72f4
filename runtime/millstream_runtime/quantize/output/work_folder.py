"""The folder in which a checkpoint is made, and what of it is done: a run that was killed goes on from there.

    .OUT.quantize/
        job.json            what is made, from what: another job never continues this one
        held_out.jsonl      documents that judge the result
        hidden-00003.f32    the hidden states before layer 3, where a method needs them
        model/              becomes OUT, in one rename, once it is complete
            model-00004-of-00033.safetensors    exists once its layer is done
        layers/             has those files instead, where the model becomes one GGUF file

Every file is written under another name, flushed and renamed. A layer's file is renamed last, so it says that all of
the layer is done.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from millstream_runtime.errors import FailureReason, InvalidConfigError, RuntimeFailure
from millstream_runtime.models.loading.checkpoint import INDEX_NAME
from millstream_runtime.quantize.output.safetensors_file import TensorInFile, tensors_of, write_file

PARTIAL = ".partial"
SPARE_BYTES = 64 << 20  # config, tokenizer, headers, report
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class WorkFolder:
    """`prepare` makes the folder, `open` what is in it. `keeps_layers`: the files of layers belong to the model."""

    def __init__(self, out: Path, num_layers: int, *, keeps_layers: bool = True) -> None:
        self.out = out
        self.path = out.parent / f".{out.name}.quantize"
        self.model = self.path / "model"
        self._layers = self.model if keeps_layers else self.path / "layers"
        self.held_out = self.path / "held_out.jsonl"
        self._num_layers = num_layers

    def prepare(self) -> None:
        """Make the folder. Raises RuntimeFailure: DiskFull, it cannot be made."""
        with writing(self.path):
            self.path.mkdir(exist_ok=True)

    def open(self, job: Mapping[str, Any]) -> None:
        """Begin, or find the folder as a run of the same job left it.

        Raises:
            InvalidConfigError: another job's work is there.
            RuntimeFailure: DiskFull, it cannot be written.
        """
        note = self.path / "job.json"
        text = json.dumps(job, indent=1, sort_keys=True) + "\n"
        if note.exists():
            self._require_same(json.loads(note.read_text(encoding="utf-8")), job)
        with writing(self.path):
            self.model.mkdir(parents=True, exist_ok=True)
            self._layers.mkdir(exist_ok=True)
            for partial in self.path.rglob(f"*{PARTIAL}"):
                partial.unlink()
        self.write(note, lambda path: path.write_text(text, encoding="utf-8"))

    def num_done(self) -> int:
        """Return how many layers are done, counted from the first."""
        done = 0
        while done < self._num_layers and self.shard(done + 1).exists():
            done += 1
        return done

    def shard(self, number: int) -> Path:
        """Return the file of a layer, counted from 1; 0 is that of the tensors outside of the layers."""
        return self._layers / f"model-{number + 1:05}-of-{self._num_layers + 1:05}.safetensors"

    def hidden(self, layer: int) -> Path:
        """Return the file of the hidden states before a layer, counted from 0."""
        return self.path / f"hidden-{layer:05}.f32"

    def write_shard(self, number: int, tensors: Mapping[str, Tensor | TensorInFile]) -> None:
        """Write the file of a layer, whole or not at all."""
        self.write(self.shard(number), lambda path: write_file(path, tensors))

    def write(self, path: Path, write: Callable[[Path], object]) -> None:
        """Call `write` with another path, flush and rename it to `path`.

        Raises:
            RuntimeFailure: DiskFull, with what to do.
        """
        partial = path.with_name(path.name + PARTIAL)
        with writing(path):
            try:
                write(partial)
                with partial.open("rb") as file:
                    os.fsync(file.fileno())
                partial.replace(path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise

    def tensors(self) -> dict[str, TensorInFile]:
        """All tensors by name, those outside of the layers first."""
        found: dict[str, TensorInFile] = {}
        for number in range(self._num_layers + 1):
            found |= dict(sorted(tensors_of(self.shard(number)).items()))
        return found

    def write_index(self) -> None:
        """Write the index of all files, which must be there."""
        weight_map, total_bytes = {}, 0
        for name, one in self.tensors().items():
            weight_map[name] = one.path.name
            total_bytes += one.num_bytes
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        self.write(self.model / INDEX_NAME, lambda path: path.write_text(text, encoding="utf-8"))

    def require_space(self, needed_bytes: int) -> None:
        """Refuse to begin without room for `needed_bytes`, less what is there already.

        Raises:
            RuntimeFailure: DiskFull, with both numbers.
        """
        there = sum(path.stat().st_size for path in self.path.rglob("*") if path.is_file())
        free_bytes = shutil.disk_usage(self.path).free
        still_bytes = max(0, needed_bytes + SPARE_BYTES - there)
        if still_bytes > free_bytes:
            raise RuntimeFailure(
                FailureReason.DISK_FULL,
                f"{self.out.parent} has {free_bytes / 1e9:.2f} GB free, and {still_bytes / 1e9:.2f} GB are needed for "
                "the checkpoint and the files to make it; free space or give another --out.",
            )

    def finish(self) -> None:
        """Rename the model to its place, and remove what is left."""
        with writing(self.out):
            self.model.replace(self.out)  # also over an empty folder
        shutil.rmtree(self.path, ignore_errors=True)

    def _require_same(self, found: Any, job: Mapping[str, Any]) -> None:
        differing = [key for key in job if not isinstance(found, dict) or found.get(key) != job[key]]
        if differing:
            raise InvalidConfigError(
                f"{self.path} holds the work of another run, with another {differing[0].replace('_', ' ')}; remove "
                "that folder, or give another --out."
            )


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A context in which an OSError becomes one sentence.

    Raises:
        RuntimeFailure: DiskFull.
    """
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            message = f"No space is left to write {path}; free some and run the same command again: it goes on."
        else:
            message = f"Cannot write {path}: {error.strerror or error}."
        raise RuntimeFailure(FailureReason.DISK_FULL, message) from None
