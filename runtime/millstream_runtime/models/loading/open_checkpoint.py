"""Open the weights of a model folder, in whichever format they are."""

from __future__ import annotations

from pathlib import Path

from millstream_runtime.gguf.gguf_model import read_gguf_folder
from millstream_runtime.models.loading.checkpoint import Checkpoint, names_of_tied_model
from millstream_runtime.models.loading.gguf_checkpoint import GgufCheckpoint
from millstream_runtime.models.loading.tensor_store import TensorStore


def open_checkpoint(folder: Path, *, is_tied: bool = False) -> TensorStore:
    """Open them. `is_tied`: the output head is the embedding, by either name of it.

    Raises:
        RuntimeFailure: CheckpointInvalid, there are no weights, or they cannot be read.
    """
    gguf = read_gguf_folder(folder)
    if gguf is not None:
        return GgufCheckpoint(folder, gguf)
    return Checkpoint(folder, names_of_tied_model if is_tied else None)
