"""The parts of an engine, from its configuration and the loaded model, and what they have counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from millstream_runtime.config import DEFAULT_NGRAM_DRAFT_TOKENS, AcceptanceRule, RuntimeConfig, SpeculationMethod
from millstream_runtime.engine.eagle.head_shard import LoadedHead
from millstream_runtime.engine.ending import Ending
from millstream_runtime.engine.execution.kernel_choice import ATTENTION_PARTS, backend_of, sampler_kernels
from millstream_runtime.engine.execution.last_tokens import LastTokens
from millstream_runtime.engine.execution.model_loading import LoadedModel
from millstream_runtime.engine.execution.model_runner import ModelRunner
from millstream_runtime.engine.execution.rank_group import RankGroup
from millstream_runtime.engine.kernel_backends import Backend, KernelChoice
from millstream_runtime.engine.kv.prefix_root import prefix_root
from millstream_runtime.engine.medusa.medusa_shard import LoadedMedusa
from millstream_runtime.engine.prefill_rate import PrefillRate
from millstream_runtime.engine.request import EngineStats
from millstream_runtime.engine.sampling.token_counts import TokenCounts
from millstream_runtime.engine.scheduling.block_manager import BlockManager
from millstream_runtime.engine.scheduling.hybrid_block_manager import make_block_manager
from millstream_runtime.engine.scheduling.pacing import Pace
from millstream_runtime.engine.scheduling.scheduler import Scheduler
from millstream_runtime.engine.scheduling.sequence import Sequence
from millstream_runtime.engine.speculation.draft_choice import Drawn
from millstream_runtime.engine.speculation.draft_model import DRAFT_LAG_TOKENS, DraftModelDrafter
from millstream_runtime.engine.speculation.drafter import Drafter
from millstream_runtime.engine.speculation.drafting import Drafting
from millstream_runtime.engine.speculation.eagle import EagleDrafter
from millstream_runtime.engine.speculation.medusa import MedusaDrafter
from millstream_runtime.engine.speculation.ngram import NGramDrafter
from millstream_runtime.logs import log
from millstream_runtime.models.config.model_config import ModelConfig
from millstream_runtime.models.loading.checkpoint_digest import checkpoint_digest


def make_blocks(config: RuntimeConfig, loaded: LoadedModel, model: ModelConfig, num_ranks: int) -> BlockManager:
    """Return the block tables over the loaded model's pool. `model`: as this engine applies it."""
    root = b""
    if config.enable_prefix_caching:
        digest, arithmetic = checkpoint_digest(Path(config.model)), loaded.shard_config.arithmetic
        block, stored = config.block_size_tokens, config.kv_cache_dtype
        root = prefix_root(digest, model, arithmetic, block, num_ranks, loaded.layout, stored)
    windows = loaded.layout.windows
    if loaded.draft is not None and len(windows) == 1 and windows[0] is not None:
        windows = (windows[0] + DRAFT_LAG_TOKENS,)  # for the draft model, which is so far behind
    return make_block_manager(
        windows,
        loaded.pool.num_blocks,
        config.block_size_tokens,
        config.max_num_seqs,
        lookahead_tokens=config.max_num_batched_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        prefix_root=root,
        has_regions=has_regions(loaded.kernels, loaded.forward.device),
    )


def has_regions(kernels: tuple[KernelChoice, ...], device: torch.device) -> bool:
    """Whether rows have regions of the pool: on GPUs whose attention is torch's, FlashAttention in place above all.

    Our kernels read block tables. On a CPU they gained nothing for prompts, and there is a kernel for decodes.
    """
    return device.type != "cpu" and backend_of(ATTENTION_PARTS[0], kernels) is Backend.TORCH


def make_runner(
    config: RuntimeConfig,
    loaded: LoadedModel,
    model: ModelConfig,
    rank_group: RankGroup,
) -> ModelRunner:
    """Return what computes steps, on all ranks."""
    device = loaded.forward.device
    return ModelRunner(
        loaded.forward,
        model.eos_token_ids,
        loaded.shard_config.policy,
        rank_group.broadcast,
        TokenCounts(config.max_num_seqs, device),
        LastTokens(config.max_num_seqs, device, rank_group.ranks) if loaded.execution.overlapped else None,
        sampler_kernels(loaded.kernels),
        loaded.graph_plan,
        config.tree,
    )


def make_drafting(
    config: RuntimeConfig,
    drafter: Drafter | None,
    loaded: LoadedModel,
    model: ModelConfig,
    ending: Ending,
    make_room: Callable[[Sequence, int], int],
) -> Drafting | None:
    """Return what decides which requests draft; None without speculation. `drafter`: None is what `config` says.

    `make_room`: see `Drafting`.
    """
    if drafter is None and config.speculation_method is SpeculationMethod.DISABLED:
        return None

    def most_tokens(sequence: Sequence) -> int:
        at_same_angles = model.tokens_at_same_angles(len(sequence.token_ids))
        return min(ending.tokens_left(sequence), at_same_angles + 1)

    def make_room_within(sequence: Sequence, num_tokens: int) -> int:
        # The branches of a tree lie one after another: together they may be longer than any answer.
        return make_room(sequence, min(num_tokens, model.max_model_len))

    tree = config.tree
    most_drafts = config.draft_tokens if tree is None else tree.num_levels
    with_weights = _drafter_with_weights(config, loaded) if drafter is None else None
    return Drafting(
        drafter or with_weights or NGramDrafter(),
        most_drafts or DEFAULT_NGRAM_DRAFT_TOKENS,
        model.vocab_size,
        most_tokens,
        config.speculation_governor,
        None if with_weights is None else make_room_within,
        tree,
    )


def _drafter_with_weights(config: RuntimeConfig, loaded: LoadedModel) -> Drafter | None:
    """Of the draft model or the heads that are loaded."""
    draft, policy = loaded.draft, loaded.shard_config.policy
    block, most_tokens = config.block_size_tokens, config.max_num_batched_tokens
    if draft is None:
        return None
    if isinstance(draft, LoadedMedusa):
        return MedusaDrafter(draft.forward, policy, block, config.tree)
    if isinstance(draft, LoadedHead):
        return EagleDrafter(draft.forward, policy, block, draft.context_tokens, most_tokens, tree=config.tree)
    is_drawn = config.speculation_acceptance is AcceptanceRule.DISTRIBUTION
    if is_drawn and not policy.is_synchronous:
        log.warning("acceptance", asked=config.speculation_acceptance.value, used=AcceptanceRule.IDENTITY.value)
        is_drawn = False  # what drafts were drawn from is compared on the host
    choice = Drawn(loaded.shard_config.model_config.vocab_size) if is_drawn else None
    return DraftModelDrafter(draft.forward, policy, block, draft.context_tokens, most_tokens, choice=choice)


def engine_stats(
    num_requests: int,
    scheduler: Scheduler,
    blocks: BlockManager,
    drafting: Drafting | None,
    pace: Pace | None,
    prefill_rate: PrefillRate,
    *,
    steps_total: int,
    last_step_tokens: int,
) -> EngineStats:
    """Return a snapshot between two steps. `num_requests`: running and waiting."""
    return EngineStats(
        num_requests_running=num_requests - scheduler.num_waiting,
        num_requests_waiting=scheduler.num_waiting,
        kv_blocks_total=blocks.num_blocks,
        kv_blocks_used=blocks.num_blocks - blocks.num_free_blocks,
        block_size_tokens=blocks.block_size_tokens,
        num_preemptions_total=scheduler.num_preemptions_total,
        steps_total=steps_total,
        last_step_tokens=last_step_tokens,
        recomputed_tokens_total=scheduler.recomputed_tokens_total,
        prefix_cache_queried_tokens_total=scheduler.queried_tokens_total,
        prefix_cache_hit_tokens_total=scheduler.hit_tokens_total,
        speculation=None if drafting is None else drafting.stats(),
        ended_by_preemptions=dict(scheduler.ended_by_preemptions),
        prompt_pace=None if pace is None else pace.chosen,
        queued_tokens=scheduler.queued_tokens,
        running_tokens=scheduler.running_tokens,
        prefill_tokens_per_second=prefill_rate.tokens_per_second,
    )
