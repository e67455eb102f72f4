"""The checkpoint of a draft head, EAGLE-1, EAGLE-3 or Medusa: checked as a whole, then loaded.

A head is built twice by the same function, as a family's model is: see `weights`. Safetensors only, as for every model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from millstream_runtime.draft_head_tensors import eagle1_name, eagle3_name, medusa_name, names_here
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.models.loading.checkpoint import Checkpoint
from millstream_runtime.models.loading.layer_kernels import LayerKernels
from millstream_runtime.models.loading.weights import ExpectedWeights, LoadedWeights, Weights

Head = TypeVar("Head")


@dataclass(frozen=True, slots=True)
class HeadKind:
    """`words`: for messages, with an article. `name_here`: of a tensor in the files, None where it is not read."""

    words: str
    name_here: Callable[[str], str | None]


EAGLE1_HEAD = HeadKind("an EAGLE-1 head", eagle1_name)
EAGLE3_HEAD = HeadKind("an EAGLE-3 head", eagle3_name)
MEDUSA_HEADS = HeadKind("the Medusa heads", medusa_name)


def open_head_checkpoint(folder: Path, kind: HeadKind) -> Checkpoint:
    """Open the weights by their names here. Raises RuntimeFailure: as `Checkpoint`."""
    return Checkpoint(folder, lambda stored: names_here(stored, kind.name_here))


def expected_head_weights(build: Callable[[Weights], object], dtype: torch.dtype) -> ExpectedWeights:
    """Every tensor that the head's checkpoint must hold, and the bytes that they will take."""
    weights = ExpectedWeights(dtype)
    build(weights)
    return weights


def load_head(
    build: Callable[[Weights], Head],
    kind: HeadKind,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    copy_budget_bytes: int = 0,
    kernels: LayerKernels | None = None,
) -> Head:
    """Check every tensor of the folder, then load the head. `copy_budget_bytes`, `kernels`: as in
    `registry.load_model`.

    Raises:
        RuntimeFailure: CheckpointInvalid or UnsupportedByRuntime, naming file and tensor.
    """
    with open_head_checkpoint(folder, kind) as checkpoint:
        wanted = expected_head_weights(build, dtype)
        _refuse_unknown_tensors(folder, checkpoint.names, wanted.expected, kind.words)
        checkpoint.check(wanted.expected.items(), wanted.dtypes)
        weights = LoadedWeights(checkpoint, dtype, device, copy_budget_bytes=copy_budget_bytes, kernels=kernels)
        return build(weights)


def _refuse_unknown_tensors(folder: Path, names: Iterable[str], expected: Iterable[str], kind: str) -> None:
    """Refuse a tensor that the head has no place for: it would be another head than the one that was trained.

    Raises:
        RuntimeFailure: CheckpointInvalid.
    """
    unknown = sorted({*names} - {*expected})
    if not unknown:
        return
    raise RuntimeFailure(
        FailureReason.CHECKPOINT_INVALID,
        f"{folder}: tensor {unknown[0]:.200} is no part of {kind} of this config.json"
        + (f", nor are {len(unknown) - 1} others" if len(unknown) > 1 else "")
        + f"; name the folder of {kind}.",
    )
