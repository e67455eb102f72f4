"""A training that was stopped goes on from its last checkpoint, with the same result as one that never stopped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a training had reached."""

    step: int
    seconds: float  # of training, over all its runs
    tensors: dict[str, torch.Tensor]


def save(path: Path, checkpoint: Checkpoint, fingerprint: str) -> None:
    """Replace the file as a whole: a kill leaves the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"step": str(checkpoint.step), "seconds": str(checkpoint.seconds), "fingerprint": fingerprint}
    partial = path.with_suffix(".partial")
    save_file(dict(checkpoint.tensors), partial, metadata)
    partial.replace(path)


def load(path: Path, fingerprint: str) -> Checkpoint | None:
    """The checkpoint, or None where there is none yet.

    Raises:
        ValueError: it is that of another recipe or of other text.
    """
    if not path.exists():
        return None
    with safe_open(path, "pt") as file:
        metadata: Mapping[str, str] = file.metadata()
        if metadata["fingerprint"] != fingerprint:
            raise ValueError(f"{path} belongs to another recipe, tokenizer or text; remove it to train from the start.")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    return Checkpoint(int(metadata["step"]), float(metadata["seconds"]), tensors)
