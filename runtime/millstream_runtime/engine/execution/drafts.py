"""What proposes tokens with weights of its own: a draft model, or heads. By method; see the file of each."""

from __future__ import annotations

from millstream_runtime.config import RuntimeConfig
from millstream_runtime.engine.eagle import head_shard
from millstream_runtime.engine.eagle.head_shard import HeadShard, LoadedHead
from millstream_runtime.engine.execution import draft_shard
from millstream_runtime.engine.execution.draft_shard import DraftShard, LoadedDraft
from millstream_runtime.engine.execution.forward import Forward
from millstream_runtime.engine.execution.shard_config import ShardConfig
from millstream_runtime.engine.medusa import medusa_shard
from millstream_runtime.engine.medusa.medusa_shard import LoadedMedusa, MedusaShard
from millstream_runtime.kv_layout import KVLayout
from millstream_runtime.models.eagle.heads import DraftHead
from millstream_runtime.models.layers.decoder import Decoder
from millstream_runtime.models.medusa.medusa_heads import MedusaHeads

DraftWeights = Decoder | DraftHead | MedusaHeads


def resolve(config: RuntimeConfig, target: ShardConfig) -> DraftShard | None:
    """Check it against the target; None without one. Raises RuntimeFailure: it cannot serve this target."""
    resolvers = (draft_shard.resolve_draft, head_shard.resolve_head, medusa_shard.resolve_medusa)
    return next((found for resolve in resolvers if (found := resolve(config, target)) is not None), None)


def load(config: RuntimeConfig, target: ShardConfig, draft: DraftShard) -> DraftWeights:
    """Load its weights, before the target's."""
    if isinstance(draft, MedusaShard):
        return medusa_shard.load(config, target, draft)
    if isinstance(draft, HeadShard):
        return head_shard.load(config, target, draft)
    return draft_shard.load_draft(config, target, draft)


def largest_step_bytes(config: RuntimeConfig, target: ShardConfig, draft: DraftShard) -> int:
    """Return the memory of its largest pass."""
    if isinstance(draft, MedusaShard):
        return medusa_shard.largest_step_bytes(config, draft, target.dtype)
    if isinstance(draft, HeadShard):
        return head_shard.largest_step_bytes(config, target, draft)
    return draft_shard.largest_step_bytes(config, target, draft)


def make(
    config: RuntimeConfig,
    target: ShardConfig,
    draft: DraftShard,
    weights: DraftWeights,
    forward: Forward,
    layout: KVLayout,
    num_blocks: int,
) -> LoadedDraft | LoadedHead | LoadedMedusa:
    """Allocate its pools, of as many blocks as the target's. `forward`, `layout`: of the target."""
    if isinstance(weights, Decoder):
        return draft_shard.make_draft(config, target, draft, weights, layout, num_blocks)
    if isinstance(weights, MedusaHeads):
        if not isinstance(draft, MedusaShard):
            raise TypeError(f"Medusa heads cannot be made of a {type(draft).__name__}")
        return medusa_shard.make_medusa(config, target, draft, weights, forward, num_blocks)
    if not isinstance(draft, HeadShard):
        raise TypeError(f"an EAGLE head cannot be made of a {type(draft).__name__}")
    return head_shard.make_head(config, target, draft, weights, forward, layout, num_blocks)
