"""An EAGLE head beside its target: what is checked before a byte of it is read, its weights, and its pools.

Two pools under the block tables of the target: the head's own keys, and the target's hidden states (`HiddenStatePool`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from millstream_runtime.config import RuntimeConfig, SpeculationMethod
from millstream_runtime.config_flags import draft_flags
from millstream_runtime.draft_tree import MAX_NODES
from millstream_runtime.engine.eagle.head_forward import HeadForward
from millstream_runtime.engine.eagle.hidden_state_pool import HiddenStatePool
from millstream_runtime.engine.execution import draft_shard
from millstream_runtime.engine.execution.draft_shard import DraftShard
from millstream_runtime.engine.execution.forward import Forward
from millstream_runtime.engine.execution.shard_config import ShardConfig
from millstream_runtime.engine.kv.kv_cache import KVCache
from millstream_runtime.errors import FailureReason, InvalidConfigError, RuntimeFailure
from millstream_runtime.kv_layout import KVLayout
from millstream_runtime.models.arithmetic import Arithmetic
from millstream_runtime.models.config.model_config import ModelConfig
from millstream_runtime.models.eagle import heads
from millstream_runtime.models.eagle.eagle3_folder import Eagle3Shape
from millstream_runtime.models.eagle.heads import DraftHead, HeadShape, read_head_folder

# Of the hidden size, per token of a pass, beside what a decoder layer takes and the kept states: the embedding, the
# state that the head reads, and both side by side.
INPUT_COPIES = 4


@dataclass(frozen=True, slots=True)
class HeadShard(DraftShard):
    """A head that passed all checks."""

    shape: HeadShape
    state_layers: tuple[int, ...]  # of the target

    def token_bytes(self, config: RuntimeConfig) -> int:
        """What the head's keys and the target's hidden states take of one token."""
        return self.key_bytes(config) + self.state_size * self.arithmetic.dtype.itemsize

    @property
    def state_size(self) -> int:
        """Elements of a token's hidden states."""
        return len(self.state_layers) * self.model_config.hidden_size


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """A head with its pools, ready to compute."""

    forward: HeadForward
    context_tokens: int
    weights_bytes: int  # second copies included
    kv_cache_bytes: int  # of both pools


def resolve_head(config: RuntimeConfig, target: ShardConfig) -> HeadShard | None:
    """Check the head against its target; None without one.

    Raises:
        RuntimeFailure: InvalidConfig, CheckpointInvalid, UnsupportedByRuntime or OutOfMemory, in one sentence that
            names the flag, the folder and what to do.
    """
    if config.speculation_method is not SpeculationMethod.EAGLE or config.draft_model is None:
        return None
    refuse_device_and_ranks(config, target)
    folder = draft_shard.draft_folder(config, "*.safetensors of an EAGLE head")
    shape = read_head_folder(folder)
    _require_same_sizes(config, target.model_config, shape)
    _require_ranks(config, shape)
    shape = replace(shape, config=draft_shard.within_target(shape.config, target))
    state_layers = _state_layers(config, shape, target.model_config.num_layers)
    weight_bytes = heads.expected_weights(shape, target.dtype).num_bytes
    draft_shard.require_fit(config, target, weight_bytes)
    context_tokens = draft_shard.context_tokens(config, target, shape.config)
    numbers = Arithmetic.of(target.dtype)
    return HeadShard(folder, shape.config, context_tokens, weight_bytes, numbers, shape, state_layers)


def refuse_device_and_ranks(config: RuntimeConfig, target: ShardConfig) -> None:
    """Heads are served on one CPU. Raises RuntimeFailure: UnsupportedByRuntime, naming the flag."""
    if target.device.type != "cpu":
        raise RuntimeFailure(
            FailureReason.UNSUPPORTED_BY_RUNTIME,
            f"--speculation-method is {config.speculation_method.value}, which this version does not have on "
            f"{target.device.type}; leave {draft_flags(config)} out, or serve the model on a CPU (--device cpu).",
        )
    if config.tensor_parallel_size > 1:
        raise RuntimeFailure(
            FailureReason.UNSUPPORTED_BY_RUNTIME,
            f"--speculation-method is {config.speculation_method.value}, which this version does not have with "
            f"--tensor-parallel-size {config.tensor_parallel_size}; leave that out, or {draft_flags(config)}.",
        )


def load(config: RuntimeConfig, target: ShardConfig, head: HeadShard) -> DraftHead:
    """Load its weights. The target's, which come after, keep their memory."""
    copy_budget_bytes = draft_shard.copy_budget_bytes(config, target, head)
    kernels = draft_shard.draft_kernels(config, target, head)
    return heads.load(head.shape, head.folder, target.dtype, target.device, copy_budget_bytes, kernels)


def largest_step_bytes(config: RuntimeConfig, target: ShardConfig, head: HeadShard) -> int:
    """Return the memory of its largest pass."""
    elements = INPUT_COPIES * head.model_config.hidden_size + head.state_size
    inputs_bytes = elements * config.max_num_batched_tokens * target.dtype.itemsize
    # Of a tree each draft with others behind it has a row of logits.
    tree_rows = 0 if config.tree is None else MAX_NODES
    logits_bytes = tree_rows * head.model_config.vocab_size * target.dtype.itemsize
    return draft_shard.largest_step_bytes(config, target, head) + inputs_bytes + logits_bytes


def make_head(
    config: RuntimeConfig,
    target: ShardConfig,
    head: HeadShard,
    loaded: DraftHead,
    forward: Forward,
    layout: KVLayout,
    num_blocks: int,
) -> LoadedHead:
    """Allocate its pools, and have `forward`, the target's, keep its hidden states. `layout`: of the target's pool."""
    num_slots, policy = num_blocks * config.block_size_tokens, target.policy
    cache = KVCache(
        head.model_config, num_slots, 1, target.dtype, target.device, zeros=policy.zeros, stored=config.kv_cache_dtype
    )
    hidden_size, layers = head.model_config.hidden_size, head.state_layers
    states = HiddenStatePool(num_slots, hidden_size, target.dtype, policy.zeros, layers)
    forward.keep_states, forward.move_states = states.write, states.move
    # Behind the window of the target's layers, blocks may be another request's.
    passes = HeadForward(loaded, forward.model, states, cache, policy, layout.windows[-1])
    return LoadedHead(passes, head.context_tokens, loaded.weight_bytes, cache.num_bytes + states.num_bytes)


def _require_same_sizes(config: RuntimeConfig, target: ModelConfig, shape: HeadShape) -> None:
    """It reads the target's hidden states and embeddings, and the target's output head reads what it gives."""
    for name in ("hidden_size", "vocab_size"):
        of_head, of_target = getattr(shape.config, name), getattr(target, name)
        if of_head != of_target:
            raise InvalidConfigError(
                f"--draft-model is {config.draft_model!r}, whose {name} is {of_head}, and that of {config.model} is "
                f"{of_target}: an EAGLE head serves only the model that it was trained with; name a head of this one."
            )
    if isinstance(shape, Eagle3Shape) and shape.target_hidden_size != target.hidden_size:
        raise InvalidConfigError(
            f"--draft-model is {config.draft_model!r}, whose target_hidden_size is {shape.target_hidden_size}, and the "
            f"hidden_size of {config.model} is {target.hidden_size}; name a head of this model."
        )


def _require_ranks(config: RuntimeConfig, shape: HeadShape) -> None:
    """A tree of drafts names tokens by their rank among those that the head proposes."""
    if (tree := config.tree) is None:
        return
    most = shape.draft_vocab_size if isinstance(shape, Eagle3Shape) else shape.config.vocab_size
    if (rank := max(max(node) for node in tree.nodes)) >= most:
        raise InvalidConfigError(
            f"--draft-tree names the rank {rank}, and {config.draft_model} proposes {most} tokens; leave out the nodes "
            f"with ranks above {most - 1}."
        )


def _state_layers(config: RuntimeConfig, shape: HeadShape, num_layers: int) -> tuple[int, ...]:
    """The layers of the target before which the head reads the hidden states."""
    layers = shape.state_layers(num_layers)
    if not all(0 <= layer <= num_layers for layer in layers):
        raise InvalidConfigError(
            f"--draft-model is {config.draft_model!r}, which reads hidden states before the layers "
            f"{', '.join(map(str, layers))}, and {config.model} has {num_layers}; name a head of this model."
        )
    return layers
