"""Medusa heads beside their target: what is checked before a byte of them is read, their weights, and their pool.

One pool under the block tables of the target, of its hidden states: the heads have no keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millstream_runtime.config import RuntimeConfig, SpeculationMethod
from millstream_runtime.engine.eagle.head_shard import refuse_device_and_ranks
from millstream_runtime.engine.eagle.hidden_state_pool import HiddenStatePool
from millstream_runtime.engine.execution import draft_shard
from millstream_runtime.engine.execution.draft_shard import DraftShard
from millstream_runtime.engine.execution.forward import Forward
from millstream_runtime.engine.execution.shard_config import ShardConfig
from millstream_runtime.engine.sampling.sampler import greedy
from millstream_runtime.errors import InvalidConfigError
from millstream_runtime.models.arithmetic import Arithmetic
from millstream_runtime.models.config.model_config import ModelConfig
from millstream_runtime.models.layers.decoder import Decoder
from millstream_runtime.models.medusa.medusa_heads import (
    MedusaHeads,
    MedusaShape,
    expected_medusa_weights,
    load_medusa_heads,
    read_medusa_folder,
)

# Of the hidden size, per row, beside the logits: the state, normed, and what a block gives.
INPUT_COPIES = 5


@dataclass(frozen=True, slots=True)
class MedusaShard(DraftShard):
    """Heads that passed all checks. `model_config`: the target's."""

    shape: MedusaShape

    def token_bytes(self, config: RuntimeConfig) -> int:
        """What the target's hidden state takes of one token."""
        return self.model_config.hidden_size * self.arithmetic.dtype.itemsize

    @property
    def sizes(self) -> tuple[int, int]:
        """Hidden size and vocabulary."""
        return self.model_config.hidden_size, self.model_config.vocab_size


class MedusaForward:
    """The heads over the target's hidden states."""

    def __init__(self, heads: MedusaHeads, target: Decoder, states: HiddenStatePool) -> None:
        self.heads, self._target, self._states = heads, target, states

    def target_states(self, slots: list[int]) -> Tensor:
        """Of the target's tokens in these slots, behind its final norm: `[len(slots), hidden]`."""
        return self._target.normed(self._states.read(slots))

    def tokens(self, head: int, states: Tensor, num_rows: int, count: int) -> list[list[int]]:
        """The `count` most probable tokens of one head, the first before the second, for each of the first `num_rows`
        states; -1 for all of them where its logits are not finite."""
        logits = self.heads.logits(head, states[:num_rows])
        if count == 1:
            return [[token_id] for token_id in greedy(logits)]
        highest, tokens = logits.topk(count, dim=-1)  # NaN is higher than any number
        return torch.where(highest[:, :1].isfinite(), tokens, -1).tolist()


@dataclass(frozen=True, slots=True)
class LoadedMedusa:
    """Heads with their pool, ready to compute."""

    forward: MedusaForward
    context_tokens: int
    weights_bytes: int  # second copies included
    kv_cache_bytes: int  # of the hidden states


def resolve_medusa(config: RuntimeConfig, target: ShardConfig) -> MedusaShard | None:
    """Check the heads against their target; None without any.

    Raises:
        RuntimeFailure: InvalidConfig, CheckpointInvalid, UnsupportedByRuntime or OutOfMemory, in one sentence that
            names the flag, the folder and what to do.
    """
    if config.speculation_method is not SpeculationMethod.MEDUSA or config.draft_model is None:
        return None
    refuse_device_and_ranks(config, target)
    folder = draft_shard.draft_folder(config, "*.safetensors of Medusa heads")
    shape, model = read_medusa_folder(folder), target.model_config
    _require_same_sizes(config, model, shape)
    _require_tree_fits(config, model, shape)
    weight_bytes = expected_medusa_weights(shape, model.hidden_size, model.vocab_size, target.dtype).num_bytes
    draft_shard.require_fit(config, target, weight_bytes)
    return MedusaShard(folder, model, model.max_model_len + 1, weight_bytes, Arithmetic.of(target.dtype), shape)


def load(config: RuntimeConfig, target: ShardConfig, heads: MedusaShard) -> MedusaHeads:
    """Load their weights. The target's, which come after, keep their memory."""
    copy_budget_bytes = draft_shard.copy_budget_bytes(config, target, heads)
    return load_medusa_heads(heads.shape, heads.sizes, heads.folder, target.dtype, target.device, copy_budget_bytes)


def largest_step_bytes(config: RuntimeConfig, heads: MedusaShard, dtype: torch.dtype) -> int:
    """Return the memory of the largest pass: one head's logits of every request."""
    hidden_size, vocab_size = heads.sizes
    return config.max_num_seqs * (INPUT_COPIES * hidden_size + vocab_size) * dtype.itemsize


def make_medusa(
    config: RuntimeConfig,
    target: ShardConfig,
    heads: MedusaShard,
    loaded: MedusaHeads,
    forward: Forward,
    num_blocks: int,
) -> LoadedMedusa:
    """Allocate the pool, and have `forward`, the target's, keep its hidden states."""
    num_slots, model = num_blocks * config.block_size_tokens, heads.model_config
    states = HiddenStatePool(num_slots, model.hidden_size, target.dtype, target.policy.zeros, (model.num_layers,))
    forward.keep_states, forward.move_states = states.write, states.move
    passes = MedusaForward(loaded, forward.model, states)
    return LoadedMedusa(passes, heads.context_tokens, loaded.weight_bytes, states.num_bytes)


def _require_same_sizes(config: RuntimeConfig, target: ModelConfig, shape: MedusaShape) -> None:
    """Where config.json says for which sizes the heads were made; their tensors say it in any case."""
    for name in ("hidden_size", "vocab_size"):
        of_heads, of_target = getattr(shape, name), getattr(target, name)
        if of_heads is not None and of_heads != of_target:
            raise InvalidConfigError(
                f"--draft-model is {config.draft_model!r}, whose {name} is {of_heads}, and that of {config.model} is "
                f"{of_target}: Medusa heads serve only the model that they were trained with; name heads of this one."
            )


def _require_tree_fits(config: RuntimeConfig, target: ModelConfig, shape: MedusaShape) -> None:
    """Each level of a tree is drafted by a head, from its own ranking of the vocabulary."""
    if (tree := config.tree) is None:
        return
    if tree.num_levels > shape.num_heads:
        raise InvalidConfigError(
            f"--draft-tree has {tree.num_levels} levels, and {config.draft_model} has {shape.num_heads} heads, one per "
            f"level; leave out the nodes of more than {shape.num_heads} ranks."
        )
    if (rank := max(max(node) for node in tree.nodes)) >= target.vocab_size:
        raise InvalidConfigError(
            f"--draft-tree names the rank {rank}, and {config.model} has {target.vocab_size} tokens; leave out the "
            f"nodes with ranks above {target.vocab_size - 1}."
        )
