"""What a draft model's pool holds, compared with the pool of its target: for a model that drafts for itself."""

from __future__ import annotations

import torch

from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.speculation.draft_model import DraftModelDrafter
from tests.support.tolerance import tolerance


def draft_model_of(engine: Engine) -> DraftModelDrafter:
    """The engine's own."""
    assert engine._drafting is not None
    drafter = engine._drafting._drafter
    assert isinstance(drafter, DraftModelDrafter)
    return drafter


def wrong_draft_blocks(engine: Engine) -> tuple[list[int], int]:
    """Blocks of which the draft model's record and the target's prefix cache say the same prefix, though the keys
    differ; and how many were compared. The draft model is the target."""
    drafter, group = draft_model_of(engine), len(engine._blocks.windows) - 1
    target, draft = engine._runner._forward._cache, drafter._forward._cache
    caches = engine._blocks._pool.caches
    if not caches:
        assert drafter._keys._hash_of == {}
        return [], 0
    cache = caches[-1]
    layers = [index for index, own in enumerate(target.layout.group_of) if own == group]
    most = tolerance(engine.model_config)
    compared = [block for block, prefix in drafter._keys._hash_of.items() if cache.find(prefix) == block]
    wrong = [
        block
        for block in compared
        if not all(
            torch.allclose(target.layers[one][block], draft.layers[one][block], rtol=most, atol=most) for one in layers
        )
    ]
    return wrong, len(compared)
