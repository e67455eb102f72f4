"""A cached block that holds other contents than its tokens' is found, in whatever arithmetic the model computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from millstream_runtime.engine.request import Request
from tests.soak.schedules.cached_blocks import Known, wrong_blocks
from tests.soak.schedules.catalogue import Catalogue
from tests.soak.schedules.engines import Engines
from tests.support.engines import generate

BLOCK_TOKENS, PROMPT_TOKENS = 8, 24


def is_cached(request: Request) -> bool:
    return len(request.prompt_token_ids) >= PROMPT_TOKENS and request.sampling.prompt_logprobs is None


@pytest.mark.parametrize("model", ["qwen3", "llama, AWQ", "llama, GPTQ"])
def test_a_block_with_the_contents_of_another_token_is_found(model: str, tmp_path: Path) -> None:
    engines = Engines(tmp_path)
    catalogue = Catalogue(engines, model, 1)
    index = next(one for one in range(99) if is_cached(catalogue.request(one)))
    alone, request = catalogue.alone(index), catalogue.request(index)
    engine = engines.make(model, block_size_tokens=BLOCK_TOKENS)
    generate(engine, [request])
    known = [Known(request, [*request.prompt_token_ids, *alone.token_ids], alone, PROMPT_TOKENS)]
    assert wrong_blocks(engine, known) == []

    last = engine._runner._forward._cache.layers[-1]
    second = alone.keys_values[False][-1][BLOCK_TOKENS : 2 * BLOCK_TOKENS]
    (place,) = (block for block in range(len(last)) if torch.allclose(last[block], second, 0.1, 0.1))
    last[place, 1] = last[place, 2].clone()
    (found,) = wrong_blocks(engine, known)
    assert f"blocks [1] of request {request.request_id} differ by" in found
