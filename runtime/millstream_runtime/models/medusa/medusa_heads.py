"""Medusa heads (Cai et al. 2024, arXiv 2401.10774): head k guesses the token k + 2 behind a hidden state of the target.

    state(j), behind the final norm ─► x + silu(linear(x)), medusa_num_layers times ─► output head k ─► t(j + k + 2)

The published layout: config.json with `medusa_num_heads` and `medusa_num_layers`, and of head k the tensors
`k.i.linear.weight`, `k.i.linear.bias` of its block i, and `k.n.weight` of its output head, where n is the number of
blocks; all of them may begin with `medusa_head.`. Safetensors only, as for every model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from millstream_runtime.models.config.fields import Fields
from millstream_runtime.models.linear.linear import Linear
from millstream_runtime.models.loading.head_checkpoint import MEDUSA_HEADS, expected_head_weights, load_head
from millstream_runtime.models.loading.weights import ExpectedWeights, Weights

MAX_HEADS, MAX_LAYERS = 16, 8


@dataclass(frozen=True, slots=True)
class MedusaShape:
    """How many heads, how many blocks each has, and the sizes of the target that they were made for; None: not said."""

    num_heads: int
    num_layers: int
    hidden_size: int | None = None
    vocab_size: int | None = None


class MedusaHeads:
    """Loaded heads.

    Attributes: `num_heads`; `weight_bytes`, second copies included.
    """

    def __init__(self, shape: MedusaShape, hidden_size: int, vocab_size: int, weights: Weights) -> None:
        """`hidden_size`, `vocab_size`: of the target."""
        self.num_heads = shape.num_heads
        self._blocks = [
            [
                weights.linear({f"{head}.{block}.linear": hidden_size}, hidden_size, bias=True)
                for block in range(shape.num_layers)
            ]
            for head in range(shape.num_heads)
        ]
        self._outputs: list[Linear] = [
            weights.linear({f"{head}.{shape.num_layers}": vocab_size}, hidden_size) for head in range(shape.num_heads)
        ]
        self.weight_bytes = weights.num_bytes

    def logits(self, head: int, states: Tensor) -> Tensor:
        """`states` `[rows, hidden]`, the target's behind its final norm, to `[rows, vocab]` of one head."""
        for linear in self._blocks[head]:
            states = states + F.silu(linear(states))
        return self._outputs[head](states)


def read_medusa_folder(folder: Path) -> MedusaShape:
    """Read config.json.

    Raises:
        RuntimeFailure: CheckpointInvalid, a field is missing or out of its range.
    """
    fields = Fields(folder / "config.json")
    if "medusa_num_heads" not in fields:
        raise fields.invalid("medusa_num_heads", "missing; name the folder of Medusa heads in the published layout")
    if fields.get("quantization_config"):
        raise fields.unsupported("quantization_config", "given", "Medusa heads of 16 and 32 bits")
    return MedusaShape(
        fields.integer("medusa_num_heads", maximum=MAX_HEADS),
        fields.integer("medusa_num_layers", 1, maximum=MAX_LAYERS),
        fields.optional_integer("hidden_size"),
        fields.optional_integer("vocab_size"),
    )


def expected_medusa_weights(
    shape: MedusaShape, hidden_size: int, vocab_size: int, dtype: torch.dtype
) -> ExpectedWeights:
    """Every tensor that the checkpoint must hold, and the bytes that they will take."""
    return expected_head_weights(partial(MedusaHeads, shape, hidden_size, vocab_size), dtype)


def load_medusa_heads(
    shape: MedusaShape,
    sizes: tuple[int, int],
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    copy_budget_bytes: int = 0,
) -> MedusaHeads:
    """Check every tensor of the folder, then load the heads.

    Args:
        sizes: hidden size and vocabulary of the target.
        copy_budget_bytes: as in `registry.load_model`.

    Raises:
        RuntimeFailure: CheckpointInvalid, naming file and tensor.
    """
    return load_head(partial(MedusaHeads, shape, *sizes), MEDUSA_HEADS, folder, dtype, device, copy_budget_bytes)
