"""The draft model beside a target: what is checked before a byte of it is read, its weights, and its KV pool.

Rank 0 alone has it, whole, also where the target is divided among ranks: rank 0 alone knows the drafts of a step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from millstream_runtime.config import KVCacheDType, RuntimeConfig, SpeculationMethod
from millstream_runtime.config_flags import draft_flags
from millstream_runtime.engine.execution import shard
from millstream_runtime.engine.execution.forward import Forward
from millstream_runtime.engine.execution.kernel_choice import choose_compiled, compiled_layers
from millstream_runtime.engine.execution.shard_config import ShardConfig, draft_arithmetic, require_format
from millstream_runtime.engine.execution.step_memory import worst_step_bytes
from millstream_runtime.engine.host_limits import memory_limit_bytes, resident_bytes
from millstream_runtime.engine.kv import pool_size
from millstream_runtime.engine.kv.kv_cache import KVCache
from millstream_runtime.errors import FailureReason, InvalidConfigError, RuntimeFailure
from millstream_runtime.kv_formats import kv_token_bytes
from millstream_runtime.kv_layout import KVLayout
from millstream_runtime.logs import log
from millstream_runtime.models.arithmetic import Arithmetic
from millstream_runtime.models.config.model_config import ModelConfig
from millstream_runtime.models.layers.decoder import Decoder
from millstream_runtime.models.linear.shares import RankInfo
from millstream_runtime.models.linear.tensor_parallel import SINGLE_PROCESS
from millstream_runtime.models.loading.kv_scales import read_kv_scales
from millstream_runtime.models.loading.layer_kernels import LayerKernels
from millstream_runtime.models.registry import expected_weights, load_model, load_model_config
from millstream_runtime.tokenizing.vocabulary import difference, vocabulary_of


@dataclass(frozen=True, slots=True)
class DraftShard:
    """A draft model that passed all checks. `context_tokens`: longer requests have no drafts."""

    folder: Path
    model_config: ModelConfig
    context_tokens: int
    weight_bytes: int  # expected, without second copies
    arithmetic: Arithmetic

    def token_bytes(self, config: RuntimeConfig) -> int:
        """What its pool keeps of one token."""
        return self.key_bytes(config)

    def key_bytes(self, config: RuntimeConfig) -> int:
        """Of its keys and values of one token."""
        shape, number_bytes = self.model_config, self.arithmetic.kv_cache.itemsize
        return kv_token_bytes(config.kv_cache_dtype.method, *shape.kv_shape, number_bytes) * shape.num_layers


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model with its pool, ready to compute."""

    forward: Forward
    context_tokens: int
    weights_bytes: int  # second copies included
    kv_cache_bytes: int


def resolve_draft(config: RuntimeConfig, target: ShardConfig) -> DraftShard | None:
    """Check the draft model against the target; None without one.

    Raises:
        RuntimeFailure: InvalidConfig, CheckpointInvalid, UnsupportedByRuntime or OutOfMemory, in one sentence that
            names the flag, the folder and what to do.
    """
    if config.speculation_method is not SpeculationMethod.DRAFT_MODEL or config.draft_model is None:
        return None
    folder = draft_folder(config, "*.safetensors and the target's tokenizer")
    shape = load_model_config(folder)
    require_format(shape, target.device)
    _require_same_vocabulary(config, target.model_config, folder, shape)
    shape = within_target(shape, target)
    arithmetic = draft_arithmetic(config, target, shape)
    weight_bytes = expected_weights(shape, arithmetic).num_bytes
    require_fit(config, target, weight_bytes)
    return DraftShard(folder, shape, context_tokens(config, target, shape), weight_bytes, arithmetic)


def within_target(shape: ModelConfig, target: ShardConfig) -> ModelConfig:
    """Return the shape of a draft model or of a head with the longest context that it shares with the target."""
    return replace(shape, max_model_len=min(shape.longest_context_tokens, target.model_config.max_model_len))


def context_tokens(config: RuntimeConfig, target: ShardConfig, shape: ModelConfig) -> int:
    """Return how long a request with drafts may be, and warn where that is less than the target takes."""
    found = 1 + shape.tokens_at_same_angles(1)
    if found < target.model_config.max_model_len:
        log.warning("draft_context", draft_model=config.draft_model, tokens=found)
    return found


def draft_folder(config: RuntimeConfig, content: str) -> Path:
    """Return the folder of `--draft-model`. `content`: what it has beside config.json."""
    folder = Path(config.draft_model or "")
    if not folder.is_dir():
        raise InvalidConfigError(
            f"--draft-model is {config.draft_model!r}, which is no folder; name a folder with config.json, {content}."
        )
    return folder


def load_draft(config: RuntimeConfig, target: ShardConfig, draft: DraftShard) -> Decoder:
    """Load its weights. The target's, which come after, keep their memory."""
    budget_bytes = copy_budget_bytes(config, target, draft)
    return load_model(
        draft.model_config,
        draft.folder,
        draft.arithmetic,
        target.device,
        copy_budget_bytes=budget_bytes,
        kernels=draft_kernels(config, target, draft),
        code=target.policy.compiled_code,
        product=target.policy.bfloat16_product if draft.arithmetic.rounds_products else None,
    )


def draft_kernels(config: RuntimeConfig, target: ShardConfig, draft: DraftShard) -> LayerKernels | None:
    """What makes the layers of a draft model or a head on the target's device; None: torch."""
    policy = target.policy
    choices = choose_compiled(draft.model_config, draft.arithmetic, config.kv_cache_dtype, policy.compiled_problem)
    return compiled_layers(choices, policy.compiled_code)


def copy_budget_bytes(config: RuntimeConfig, target: ShardConfig, draft: DraftShard) -> int:
    """Return what second copies of its weights may take, on a device that uses them."""
    if target.device.type != "cpu":
        return 0
    limit_bytes = memory_limit_bytes() // config.tensor_parallel_size
    needed_bytes = draft.weight_bytes + _target_bytes(target) // config.tensor_parallel_size
    used_bytes = resident_bytes()
    # The step of the whole model, which is no less than that of a rank.
    step_bytes = shard.step_reserve_bytes(config, target, SINGLE_PROCESS, limit_bytes, used_bytes + needed_bytes)
    return pool_size.copy_budget_bytes(limit_bytes, used_bytes, needed_bytes, step_bytes)


def size_pools(
    config: RuntimeConfig,
    target: ShardConfig,
    budget: pool_size.MemoryBudget,
    ranks: RankInfo,
    draft: DraftShard | None,
) -> pool_size.PoolSize:
    """Return the blocks of the target's pool, and of the draft model's where there is one: both share the memory.

    Raises:
        RuntimeFailure: OutOfMemory, with the budget and what the draft model takes of it.
    """
    if draft is None:
        return shard.size_pool(config, target, budget, ranks)
    token_bytes = draft.token_bytes(config)
    try:
        return shard.size_pool(config, target, budget, ranks, token_bytes)
    except RuntimeFailure as failure:
        raise RuntimeFailure(
            failure.reason,
            f"{failure.message} The draft model takes {pool_size.gibibytes(draft.weight_bytes)} of weights and "
            f"{token_bytes} bytes per token of this; leave {draft_flags(config)} out to give them to the model.",
        ) from None


def make_draft(
    config: RuntimeConfig, target: ShardConfig, draft: DraftShard, model: Decoder, layout: KVLayout, blocks: int
) -> LoadedDraft:
    """Allocate its pool of as many blocks as the target's. `layout`: of the target's pool."""
    shape = draft.model_config
    is_fp8 = config.kv_cache_dtype is KVCacheDType.FP8
    cache = KVCache(
        shape,
        blocks,
        config.block_size_tokens,
        draft.arithmetic.dtype,
        target.device,
        zeros=target.policy.zeros,
        stored=config.kv_cache_dtype,
        plain_dtype=draft.arithmetic.kv_cache,
        fp8_scales=read_kv_scales(draft.folder, shape.num_layers) if is_fp8 else (),
    )
    # Behind the window of the target's layers, blocks may be another request's.
    forward = Forward(model, cache, target.policy, longest_window=layout.windows[-1])
    return LoadedDraft(forward, draft.context_tokens, model.weight_bytes, cache.num_bytes)


def largest_step_bytes(config: RuntimeConfig, target: ShardConfig, draft: DraftShard) -> int:
    """Return the memory of its largest pass."""
    return worst_step_bytes(
        draft.model_config,
        draft.arithmetic.dtype.itemsize,
        num_tokens=config.max_num_batched_tokens,
        num_rows=config.max_num_seqs,
        longest_tokens=draft.context_tokens,
        kv_method=config.kv_cache_dtype.method,
        is_kv_widened=draft.arithmetic.kv_cache is not draft.arithmetic.dtype,
        has_trees=config.tree is not None,
    )


def _require_same_vocabulary(config: RuntimeConfig, target: ModelConfig, folder: Path, draft: ModelConfig) -> None:
    """By the tokens themselves. Embeddings may be padded to different sizes; without tokenizers sizes must be equal."""
    target_folder = Path(config.model)
    of_target, of_draft = vocabulary_of(target_folder), vocabulary_of(folder)
    if of_target is None and of_draft is None:
        found = None
        if target.vocab_size != draft.vocab_size:
            found = f"its vocab_size is {draft.vocab_size}, the target's {target.vocab_size}"
    elif of_target is None or of_draft is None:
        found = f"only the {'draft model' if of_target is None else 'target'} has a tokenizer that can be read"
    else:
        found = difference(of_target, of_draft)
    if found is not None:
        raise InvalidConfigError(
            f"--draft-model is {str(folder)!r}, whose tokens are not those of {target_folder}: {found}; name a draft "
            f"model with the target's tokenizer, or leave {draft_flags(config)} out."
        )


def require_fit(config: RuntimeConfig, target: ShardConfig, weight_bytes: int) -> None:
    """Refuse weights that are larger than the target's, or do not fit next to them."""
    target_bytes, gibibytes = _target_bytes(target), pool_size.gibibytes
    if weight_bytes > target_bytes:
        raise InvalidConfigError(
            f"--draft-model is {config.draft_model!r}, whose weights ({gibibytes(weight_bytes)}) are larger than those "
            f"of {config.model} ({gibibytes(target_bytes)}): drafts would cost more than they save; name a smaller one."
        )
    limit_bytes = memory_limit_bytes()
    if target.device.type != "cpu":
        limit_bytes = torch.cuda.mem_get_info(target.device)[0]
        target_bytes //= config.tensor_parallel_size  # each rank has a GPU of its own
    missing_bytes = weight_bytes + target_bytes - limit_bytes
    if missing_bytes > 0:
        raise RuntimeFailure(
            FailureReason.OUT_OF_MEMORY,
            f"--draft-model {config.draft_model} needs {gibibytes(weight_bytes)} of weights beside the "
            f"{gibibytes(target_bytes)} of {config.model}, but {gibibytes(limit_bytes)} of memory is usable: "
            f"{gibibytes(missing_bytes)} are missing; give more memory, or leave {draft_flags(config)} out "
            "(spec.speculation).",
        )


def _target_bytes(target: ShardConfig) -> int:
    return expected_weights(target.model_config, target.arithmetic).num_bytes
