"""Heads of all kinds behind one interface: which kind a folder holds, its shape, and its weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from millstream_runtime.draft_heads import is_eagle3
from millstream_runtime.models.config.fields import Fields
from millstream_runtime.models.config.model_config import ModelConfig
from millstream_runtime.models.eagle.eagle3_folder import Eagle3Shape, read_eagle3_folder
from millstream_runtime.models.eagle.eagle3_head import Eagle3Head
from millstream_runtime.models.eagle.eagle_folder import EagleShape, read_eagle_folder
from millstream_runtime.models.eagle.eagle_head import EagleHead
from millstream_runtime.models.layers.attention import Attention
from millstream_runtime.models.layers.decoder import Decoder
from millstream_runtime.models.loading.head_checkpoint import (
    EAGLE1_HEAD,
    EAGLE3_HEAD,
    expected_head_weights,
    load_head,
    open_head_checkpoint,
)
from millstream_runtime.models.loading.layer_kernels import LayerKernels
from millstream_runtime.models.loading.weights import ExpectedWeights, Weights

HeadShape = EagleShape | Eagle3Shape


class DraftHead(Protocol):
    """A loaded head that drafts one token after another."""

    config: ModelConfig  # of its layers
    token_ids: list[int] | None  # the target's id of each token that it proposes; None: the same
    weight_bytes: int

    def read_states(self, target: Decoder, kept: Tensor) -> Tensor:
        """What the target's pool keeps of tokens to what `forward` takes, `[T, hidden]`."""

    def forward(self, embedded: Tensor, states: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Return the states of the tokens, `[T, hidden]`; see `EagleHead.forward`."""

    def logits(self, target: Decoder, states: Tensor) -> Tensor:
        """`[rows, hidden]` of `forward` to logits of the tokens that it proposes."""


def read_head_folder(folder: Path) -> HeadShape:
    """Read config.json and the headers of the weights.

    Raises:
        RuntimeFailure: CheckpointInvalid, or UnsupportedByRuntime where it is no head that is served.
    """
    return read_eagle3_folder(folder) if _is_eagle3(folder) else read_eagle_folder(folder)


def expected_weights(shape: HeadShape, dtype: torch.dtype) -> ExpectedWeights:
    """Every tensor that the head's checkpoint must hold, and the bytes that they will take."""
    return expected_head_weights(partial(_build, shape), dtype)


def load(
    shape: HeadShape,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    copy_budget_bytes: int = 0,
    kernels: LayerKernels | None = None,
) -> DraftHead:
    """Check every tensor of the folder, then load the head. `copy_budget_bytes`, `kernels`: as in
    `registry.load_model`.

    Raises:
        RuntimeFailure: CheckpointInvalid, naming file and tensor.
    """
    kind = EAGLE3_HEAD if isinstance(shape, Eagle3Shape) else EAGLE1_HEAD
    return load_head(partial(_build, shape), kind, folder, dtype, device, copy_budget_bytes, kernels)


def _build(shape: HeadShape, weights: Weights) -> DraftHead:
    return Eagle3Head(shape, weights) if isinstance(shape, Eagle3Shape) else EagleHead(shape, weights)


def _is_eagle3(folder: Path) -> bool:
    values = Fields(folder / "config.json").values
    with open_head_checkpoint(folder, EAGLE3_HEAD) as checkpoint:
        return is_eagle3(values, checkpoint.names)
