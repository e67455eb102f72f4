"""Logits and greedy answers are those of transformers, across chunks and slabs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from millstream_runtime.config import Device, RuntimeConfig
from millstream_runtime.job_memory.judging import CHUNK_TOKENS
from millstream_runtime.quality.scored_model import ScoredModel

TOKENS = torch.randint(0, 256, (700,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def model(base: Path) -> ScoredModel:
    return ScoredModel(RuntimeConfig(model=str(base), served_model_name="m", device=Device.CPU, max_model_len=800))


@pytest.fixture(scope="module")
def reference(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()


@pytest.mark.matrix("slab_bytes")
@pytest.mark.parametrize("slab_bytes", [1, 4 * 272 * 100, 64 << 20])
@pytest.mark.parametrize("first", [1, 511, 512, 513, 699])
def test_logits_are_those_of_transformers(
    model: ScoredModel, reference: Any, first: int, slab_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "_slab_rows", max(1, slab_bytes // (4 * model.vocab_size)))
    with torch.inference_mode():
        expected = reference(torch.tensor([TOKENS])).logits[0, first - 1 : -1]
    position = first
    for slab in model.logits(TOKENS, first):
        assert slab.first == position
        rows = expected[position - first : position - first + len(slab.logits)]
        torch.testing.assert_close(slab.logits, rows, atol=2e-3, rtol=1e-3)
        position += len(slab.logits)
    assert position == len(TOKENS)


def test_a_greedy_answer_is_that_of_transformers(model: ScoredModel, reference: Any) -> None:
    prompt = TOKENS[: CHUNK_TOKENS + 5]
    with torch.inference_mode():
        expected = reference.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12)
    assert model.greedy(prompt, 12) == expected[0, len(prompt) :].tolist()


def test_a_greedy_answer_ends_at_the_longest_context(model: ScoredModel) -> None:
    assert len(model.greedy((TOKENS * 2)[:790], 100)) <= 10
