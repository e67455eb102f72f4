"""Every cached block holds the keys and values of the tokens that it is found by.

A block with other contents gives wrong tokens to whoever hits it. Few schedules come back to every block, so all of
them are compared here with what the request computed alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.request import Request
from millstream_runtime.engine.scheduling.block_manager import BlockManager
from millstream_runtime.engine.scheduling.hybrid_block_manager import HybridBlockManager
from millstream_runtime.engine.scheduling.prefix_cache import extend_hashes
from millstream_runtime.engine.scheduling.sequence import Sequence
from tests.soak.schedules.catalogue import Alone
from tests.support.tolerance import tolerance


@dataclass(frozen=True, slots=True)
class Known:
    """Tokens that an engine has computed. `alone`: their keys and values, as far as `num_comparable` tokens."""

    request: Request
    token_ids: list[int]
    alone: Alone
    num_comparable: int


def wrong_blocks(engine: Engine, known: Iterable[Known]) -> list[str]:
    """Compare all cached blocks of an idle engine; a sentence for each that is wrong or that no request explains."""
    found: list[str] = []
    explained: list[set[int]] = [set() for _ in _managers(engine)]
    for one in known:
        for is_switched in (False, True):
            found += _compare(engine, one, explained, is_switched=is_switched)
    for group, manager in enumerate(_managers(engine)):
        cached = set(manager._cache._hash_of) if manager._cache is not None else set()
        if cached - explained[group]:
            found.append(f"blocks {sorted(cached - explained[group])} of group {group} hold no request's tokens")
    return found


def _compare(engine: Engine, one: Known, explained: list[set[int]], *, is_switched: bool) -> Iterator[str]:
    """`is_switched`: the blocks of a sequence that turns by its model's angles for long ones (longrope)."""
    cache = engine._runner._forward._cache
    most = tolerance(engine.model_config)
    block_size = cache.block_size_tokens
    variant = engine.model_config.rotary_offset(engine.model_config.max_model_len if is_switched else 0)
    alone = one.alone.keys_values.get(is_switched)
    for group, manager in enumerate(_managers(engine)):
        if manager._cache is None:
            continue
        blocks = [manager._cache.find(one_hash) for one_hash in _hashes(one, variant, block_size, manager)]
        explained[group].update(block for block in blocks if block is not None)
        num_blocks = 0 if alone is None else min(one.num_comparable, len(alone[0])) // block_size
        places = [place for place, block in enumerate(blocks[:num_blocks]) if block is not None]
        if alone is None or not places:
            continue
        at = [blocks[place] for place in places]
        for layer in (index for index, own in enumerate(cache.layout.group_of) if own == group):
            by_block = alone[layer][: num_blocks * block_size].view(num_blocks, block_size, *alone[layer].shape[1:])
            expected, held = by_block[places], cache.layers[layer][at]
            if not torch.allclose(held, expected, rtol=most, atol=most):
                worst = (held - expected).abs().flatten(1).amax(1)
                wrong = [place for place, error in zip(places, worst.tolist(), strict=True) if not error < most]
                yield f"layer {layer}, blocks {wrong} of request {one.request.request_id} differ by {worst.max():.2g}"


def _hashes(one: Known, variant: int, block_size_tokens: int, manager: BlockManager) -> list[bytes]:
    sequence = Sequence(one.request, 0, 0, one.token_ids, len(one.request.prompt_token_ids), kv_variant=variant)
    return extend_hashes(sequence, block_size_tokens, manager._cache.root if manager._cache is not None else b"")


def _managers(engine: Engine) -> list[BlockManager]:
    blocks = engine._blocks
    return [blocks, *(blocks._others if isinstance(blocks, HybridBlockManager) else [])]
