"""Heads that cannot serve are refused at boot: one sentence that names the flag or the folder, and what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from millstream_runtime.config import SpeculationMethod
from millstream_runtime.engine.eagle import head_shard
from millstream_runtime.engine.execution import draft_shard
from millstream_runtime.engine.execution.shard_config import ShardConfig
from millstream_runtime.errors import FailureReason, InvalidConfigError, RuntimeFailure
from millstream_runtime.models.arithmetic import Arithmetic
from tests.support.eagle_heads import WriteHead, to_speculators
from tests.support.engines import MakeEngine, WriteModel
from tests.support.runtime_args import from_args

pytestmark = pytest.mark.usefixtures("one_thread")
Refuse = Callable[..., str]
ChangeTensors = Callable[[dict[str, Tensor]], Any]


@pytest.fixture
def refuse(make_engine: MakeEngine, write_model: WriteModel) -> Refuse:
    """`refuse(head, reason, **config)`: the message."""

    def message(head: Path, reason: FailureReason = FailureReason.CHECKPOINT_INVALID, **config: Any) -> str:
        with pytest.raises(RuntimeFailure) as found:
            make_engine(write_model(), speculation_method=SpeculationMethod.EAGLE, draft_model=str(head), **config)
        assert "\n" not in found.value.message
        assert found.value.reason is reason
        return found.value.message

    return message


@pytest.fixture
def changed(tmp_path: Path, write_model: WriteModel, write_head: WriteHead) -> Callable[..., Path]:
    """`changed(tensors, **fields)`: a copy of a head with other tensors or fields of config.json."""

    def make(change: ChangeTensors = lambda tensors: None, **fields: Any) -> Path:
        folder = tmp_path / "head"
        shutil.copytree(write_head(write_model()), folder)
        config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, str(folder / "model.safetensors"))
        (folder / "config.json").write_text(json.dumps(config | fields))
        return folder

    return make


def test_a_missing_folder(refuse: Refuse, tmp_path: Path) -> None:
    text = refuse(tmp_path / "none", FailureReason.INVALID_CONFIG)
    assert text.startswith("--draft-model is '")
    assert "is no folder; name a folder with config.json, *.safetensors of an EAGLE head" in text


def test_weights_that_are_pickled(refuse: Refuse, changed: Callable[..., Path]) -> None:
    folder = changed()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pickled weights (pytorch_model.bin)" in refuse(folder)


@pytest.mark.parametrize(("field", "value"), [("hidden_size", 64), ("vocab_size", 150)])
def test_a_head_of_another_target(
    field: str, value: int, refuse: Refuse, write_model: WriteModel, write_head: WriteHead
) -> None:
    other = write_model(**{field: value}, pad_token_id=2)
    head = write_head(other, num_attention_heads=4, num_key_value_heads=2)
    text = refuse(head, FailureReason.INVALID_CONFIG)
    of_target = {"hidden_size": 48, "vocab_size": 199}[field]
    assert f"whose {field} is {value}, and that of" in text
    assert f"is {of_target}: an EAGLE head serves only the model that it was trained with" in text


def test_a_missing_tensor(refuse: Refuse, changed: Callable[..., Path]) -> None:
    text = refuse(changed(lambda tensors: tensors.pop("layers.0.mlp.up_proj.weight")))
    assert "tensor model.layers.0.mlp.up_proj.weight [56, 48] is missing from the checkpoint" in text


def test_a_tensor_too_many(refuse: Refuse, changed: Callable[..., Path]) -> None:
    text = refuse(changed(lambda tensors: tensors.update({"layers.0.input_layernorm.weight": torch.ones(48)})))
    assert "tensor model.layers.0.input_layernorm.weight is no part of an EAGLE-1 head of this config.json" in text


def test_a_tensor_in_both_layouts(refuse: Refuse, changed: Callable[..., Path]) -> None:
    """One of them is not what was trained, and nothing says which."""
    text = refuse(changed(lambda tensors: tensors.update({"fusion_fc.weight": torch.ones(48, 96)})))
    assert "tensor fusion_fc.weight is no part of an EAGLE-1 head of this config.json" in text


def test_a_tensor_of_any_name(refuse: Refuse, changed: Callable[..., Path]) -> None:
    text = refuse(changed(lambda tensors: tensors.update({"x\ny" * 1000: torch.ones(1)})))
    assert r"tensor x\nyx\ny" in text
    assert len(text) < 1000


def test_a_shape_that_does_not_fit(refuse: Refuse, changed: Callable[..., Path]) -> None:
    text = refuse(changed(lambda tensors: tensors.update({"fc.weight": torch.ones(48, 48)})))
    assert "tensor fc.weight has shape [48, 48]; config.json asks for [48, 96]" in text


def test_weights_that_are_no_numbers(refuse: Refuse, changed: Callable[..., Path]) -> None:
    head = changed(lambda tensors: tensors["fc.weight"][3, 4].fill_(torch.nan))
    assert f"Tensor fc.weight of {head / 'model.safetensors'} holds NaN" in refuse(head)


def test_what_is_the_targets_own_may_be_there(
    changed: Callable[..., Path], make_engine: MakeEngine, write_model: WriteModel
) -> None:
    more = {"embed_tokens.weight": torch.ones(199, 48), "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    head = changed(lambda tensors: tensors.update(more))
    make_engine(write_model(), speculation_method=SpeculationMethod.EAGLE, draft_model=str(head))


@pytest.mark.parametrize(
    "fields",
    [
        {"speculators_model_type": "mtp"},
        {"layernorms": True},
        {"add_para_norm": True},
        {"hidden_act": "gelu"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_other_heads(fields: dict[str, Any], refuse: Refuse, changed: Callable[..., Path]) -> None:
    text = refuse(changed(**fields), FailureReason.UNSUPPORTED_BY_RUNTIME)
    assert str(next(iter(fields.values())))[:10] in text


@pytest.mark.parametrize(
    "fields", [{"architectures": ["LlamaForCausalLMEagle3"]}, {"speculators_model_type": "eagle3"}, {}]
)
def test_the_tensors_of_one_kind_in_a_folder_of_another(
    fields: dict[str, Any], refuse: Refuse, changed: Callable[..., Path]
) -> None:
    """By config.json, or by a tensor that EAGLE-3 heads alone have."""
    more = {} if fields else {"midlayer.hidden_norm.weight": torch.ones(48)}
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}  # the target has two
    text = refuse(changed(lambda tensors: tensors.update(more), **fields, **layers))
    assert "tensor fc.bias is no part of an EAGLE-3 head of this config.json" in text


def test_norms_of_speculators(tmp_path: Path, refuse: Refuse, write_model: WriteModel, write_head: WriteHead) -> None:
    to_speculators(write_head(write_model()), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"layernorms": True}))
    assert "layernorms True is not supported" in refuse(tmp_path, FailureReason.UNSUPPORTED_BY_RUNTIME)


def test_several_ranks(changed: Callable[..., Path]) -> None:
    head = changed()
    config = from_args(
        ["--model", "m", "--speculation-method", "EAGLE", "--draft-model", str(head), "--tensor-parallel-size", "2"]
    )
    target = ShardConfig(None, torch.device("cpu"), Arithmetic.of(torch.float32), None)  # type: ignore[arg-type]
    with pytest.raises(RuntimeFailure) as found:
        head_shard.resolve_head(config, target)
    assert found.value.reason is FailureReason.UNSUPPORTED_BY_RUNTIME
    assert "--tensor-parallel-size 2; leave that out, or --speculation-method and --draft-model." in found.value.message


def test_no_memory_for_its_weights(
    refuse: Refuse, changed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_shard, "memory_limit_bytes", lambda: 110 << 10)
    text = refuse(changed(), FailureReason.OUT_OF_MEMORY)
    flags = "--speculation-method and --draft-model"
    assert text.endswith(f"are missing; give more memory, or leave {flags} out (spec.speculation).")


def test_no_memory_for_its_keys_and_states(
    make_engine: MakeEngine, write_model: WriteModel, write_head: WriteHead
) -> None:
    """What the model alone has room for is too little for both."""
    folder = write_model(max_position_embeddings=4096)
    head, method = write_head(folder), SpeculationMethod.EAGLE
    make_engine(folder, max_model_len=2500)
    with pytest.raises(RuntimeFailure) as found:
        make_engine(folder, speculation_method=method, draft_model=str(head), max_model_len=2500)
    assert "The KV cache for one request of 2500 tokens needs" in found.value.message
    assert f"{6 * 8 * 4 + 48 * 4} bytes per token of this; leave --speculation-method and" in found.value.message


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--speculation-method", "EAGLE"], "is EAGLE, but --draft-model is missing; name the head's folder"),
        (["--draft-model", "d"], "set it to DraftModel, EAGLE, Medusa, or leave --draft-model out"),
    ],
)
def test_flags_that_do_not_fit(flags: list[str], message: str) -> None:
    with pytest.raises(InvalidConfigError) as found:
        from_args(["--model", "m", *flags])
    assert message in found.value.message


def test_five_tokens_by_default() -> None:
    flags = ["--model", "m", "--speculation-method", "EAGLE", "--draft-model", "d"]
    assert from_args(flags).draft_tokens == 5
