"""Open the weights of a model folder, in whichever format they are."""

from __future__ import annotations

from pathlib import Path

from millstream_runtime.gguf.gguf_model import read_gguf_folder
from millstream_runtime.models.loading.checkpoint import Checkpoint
from millstream_runtime.models.loading.gguf_checkpoint import GgufCheckpoint
from millstream_runtime.models.loading.tensor_store import TensorStore


def open_checkpoint(folder: Path) -> TensorStore:
    """Raises RuntimeFailure: CheckpointInvalid, there are no weights, or they cannot be read."""
    gguf = read_gguf_folder(folder)
    return Checkpoint(folder) if gguf is None else GgufCheckpoint(folder, gguf)
