"""An EAGLE-3 head drafts what its definition says, and changes no token; what is no such head is refused by name.

How a head follows blocks, prefixes and preemptions is that of every head: see test_eagle.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from millstream_runtime.config import KVCacheDType
from millstream_runtime.engine.request import SamplingParams
from millstream_runtime.errors import FailureReason, RuntimeFailure
from tests.support.drafting_engines import MakeDrafting, counts, requests_of
from tests.support.eagle3_heads import Eagle3Reference, to_eagle3_speculators, write_eagle3_head
from tests.support.eagle_heads import save_head, watch_drafts
from tests.support.engines import MakeEngine, WriteModel, generate, greedy
from tests.support.small_pool import shrink_pool

pytestmark = [pytest.mark.usefixtures("one_thread", "drafts_catch_up_by_fixed_chunks"), pytest.mark.deep]
LAYERS = 4
Change = Callable[[dict[str, Any], dict[str, Tensor]], Any]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"norm_before_residual": True},
        {"eagle_aux_hidden_state_layer_ids": [0, 3, 1]},
        {"draft_vocab_size": 199},
    ],
    ids=["published", "norm before residual", "layers", "whole vocabulary"],
)
def test_a_head_drafts_what_transformers_layers_do(
    fields: dict[str, Any], tmp_path: Path, write_model: WriteModel, eagle_headed: MakeDrafting, make_engine: MakeEngine
) -> None:
    target = write_model(num_hidden_layers=LAYERS)
    head = write_eagle3_head(tmp_path, target, **fields)
    asked = requests_of((21, 1, 40), greedy(16))
    engine = eagle_headed(target, head)
    wrong = watch_drafts(engine, Eagle3Reference(target, head))  # type: ignore[arg-type]
    assert generate(engine, asked) == generate(make_engine(target), asked)
    assert wrong == []
    assert counts(engine).num_draft_tokens > 40


def test_both_layouts_are_one_head_and_seeded_samples_stay(
    tmp_path: Path, write_model: WriteModel, eagle_headed: MakeDrafting, make_engine: MakeEngine
) -> None:
    target = write_model(num_hidden_layers=LAYERS)
    published = write_eagle3_head(tmp_path / "a", target, norm_before_residual=True)
    engine = eagle_headed(target, to_eagle3_speculators(published, tmp_path / "b"))
    wrong = watch_drafts(engine, Eagle3Reference(target, published))  # type: ignore[arg-type]
    asked = requests_of((21, 40), SamplingParams(12, temperature=1.0, seed=7))
    assert generate(engine, asked) == generate(make_engine(target), asked)
    assert wrong == []
    assert counts(engine).num_draft_tokens > 0


def test_preemptions_and_cached_prefixes_keep_all_three_states(
    tmp_path: Path, write_model: WriteModel, eagle_headed: MakeDrafting
) -> None:
    target = write_model(num_hidden_layers=LAYERS)
    head = write_eagle3_head(tmp_path, target)
    engine = eagle_headed(target, head)
    shrink_pool(engine, 17, enable_prefix_caching=True)
    wrong = watch_drafts(engine, Eagle3Reference(target, head))  # type: ignore[arg-type]
    asked = requests_of((30, 61, 77, 45, 30), greedy(16))
    for turn in range(2):
        generate(engine, [replace(one, request_id=f"{turn}{one.request_id}") for one in asked])
    assert engine.stats().num_preemptions_total > 0
    assert engine.stats().prefix_cache_hit_tokens_total > 0
    assert wrong == []


def test_keys_and_three_states_are_counted(tmp_path: Path, write_model: WriteModel, eagle_headed: MakeDrafting) -> None:
    target = write_model(num_hidden_layers=LAYERS)
    use = eagle_headed(target, write_eagle3_head(tmp_path, target), kv_cache_dtype=KVCacheDType.AUTO).memory_use
    assert use.draft_kv_cache_bytes == use.kv_cache_tokens * (2 * 3 * 8 + 3 * 48) * 4


@pytest.fixture
def refuse(tmp_path: Path, write_model: WriteModel, eagle_headed: MakeDrafting) -> Callable[..., str]:
    """`refuse(change, reason)`: the message, of a head whose config.json and tensors are changed."""

    def message(change: Change, reason: FailureReason = FailureReason.CHECKPOINT_INVALID, layers: int = LAYERS) -> str:
        target = write_model(num_hidden_layers=layers)
        head = write_eagle3_head(tmp_path, target)
        config, tensors = json.loads((head / "config.json").read_text()), load_file(head / "model.safetensors")
        change(config, tensors)
        save_head(head, config, tensors)
        with pytest.raises(RuntimeFailure) as found:
            eagle_headed(target, head)
        assert "\n" not in found.value.message
        assert found.value.reason is reason
        return found.value.message

    return message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda config, tensors: tensors.pop("midlayer.hidden_norm.weight"), "model.layers.0.hidden_norm.weight [48]"),
        (lambda config, tensors: tensors.update({"fc.weight": torch.ones(48, 96)}), "fc.weight has shape [48, 96]"),
        (
            lambda config, tensors: tensors.update({"fc.bias": torch.ones(48)}),
            "tensor fc.bias is no part of an EAGLE",
        ),
        (lambda config, tensors: tensors["d2t"][5].fill_(195), "Tensor d2t maps draft token 5 to 200; vocab_size is"),
        (lambda config, tensors: tensors["d2t"][0].fill_(-1), "Tensor d2t maps draft token 0 to -1; vocab_size is 199"),
        (lambda config, tensors: tensors.update({"d2t": torch.zeros(64)}), "d2t"),
        (lambda config, tensors: tensors["lm_head.weight"][0].fill_(torch.nan), "model.safetensors holds NaN"),
        (
            lambda config, tensors: config.update({"draft_vocab_size": 200}),
            "draft_vocab_size is 200, and vocab_size",
        ),
        (lambda config, tensors: tensors.pop("d2t"), "draft_vocab_size is 64, and vocab_size is 199; it must be"),
        (
            lambda config, tensors: config.update({"eagle_aux_hidden_state_layer_ids": [1, 2]}),
            "eagle_aux_hidden_state_layer_ids is [1, 2]; it must be a list of 3 numbers of layers",
        ),
    ],
)
def test_a_folder_that_is_no_such_head(change: Change, said: str, refuse: Callable[..., str]) -> None:
    assert said in refuse(change)


@pytest.mark.parametrize(
    ("field", "value"), [("norm_before_fc", True), ("num_hidden_layers", 2), ("hidden_act", "gelu")]
)
def test_other_heads(field: str, value: Any, refuse: Callable[..., str]) -> None:
    text = refuse(lambda config, tensors: config.update({field: value}), FailureReason.UNSUPPORTED_BY_RUNTIME)
    assert f"{field} {value!r}" in text


def test_a_head_of_another_target(refuse: Callable[..., str]) -> None:
    reason = FailureReason.INVALID_CONFIG
    text = refuse(lambda config, tensors: config.update({"target_hidden_size": 64}), reason)
    assert "whose target_hidden_size is 64, and the hidden_size of" in text
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}
    assert "before the layers 1, 2, 9, and" in refuse(lambda config, tensors: config.update(ids), reason)
    assert "before the layers 2, 1, -1, and" in refuse(lambda config, tensors: None, reason, layers=2)
