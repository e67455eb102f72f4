"""Static scales of an FP8 KV cache, as checkpoints carry them: one number for the keys of a layer, one for the values.

compressed-tensors and AutoFP8 write them next to the attention, ModelOpt into the projections, and older files one for
both.
"""

from __future__ import annotations

from pathlib import Path

import torch

from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.models.loading.open_checkpoint import open_checkpoint
from millstream_runtime.models.loading.tensor_store import FLOAT_DTYPES, TensorStore

KEY_NAMES = ("k_scale", "attn.k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale")
VALUE_NAMES = ("v_scale", "attn.v_scale", "v_proj.v_scale", "v_proj.output_scale", "kv_scale")


def read_kv_scales(folder: Path, num_layers: int) -> list[tuple[float, float]]:
    """Return the scales of keys and of values, by layer: 1 where the checkpoint has none, as in vLLM.

    Where it has only one of a layer, that serves keys and values. A number is stored as itself divided by its scale.

    Raises:
        RuntimeFailure: CheckpointInvalid, a scale is not one positive number; the message names the tensor.
    """
    with open_checkpoint(folder) as checkpoint:
        return [_of_layer(checkpoint, f"model.layers.{layer}.self_attn") for layer in range(num_layers)]


def _of_layer(checkpoint: TensorStore, attention: str) -> tuple[float, float]:
    keys, values = (
        next((_read(checkpoint, name) for name in _full(attention, names) if name in checkpoint), None)
        for names in (KEY_NAMES, VALUE_NAMES)
    )
    return keys or values or 1.0, values or keys or 1.0


def _full(attention: str, names: tuple[str, ...]) -> list[str]:
    return [f"{attention}.{name}" for name in names]


def _read(checkpoint: TensorStore, name: str) -> float:
    stored = checkpoint.described(name)
    assert stored is not None  # noqa: S101 - it is in the checkpoint
    what = f"{stored.dtype} of shape {list(stored.shape)}"
    if stored.dtype in FLOAT_DTYPES and all(size == 1 for size in stored.shape):
        scale = float(checkpoint.read(name).to(torch.float32))
        if 0 < scale < float("inf"):
            return scale
        what = str(scale)
    raise RuntimeFailure(
        FailureReason.CHECKPOINT_INVALID,
        f"{stored.path}: tensor {name} is {what}; a scale of the KV cache must be one finite float above 0. Leave out "
        "--kv-cache-dtype fp8, or take int8, which needs no scales.",
    )
