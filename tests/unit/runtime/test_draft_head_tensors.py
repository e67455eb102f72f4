"""A tensor that is missing, surplus or of another size is named from the headers alone, as the runtime would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from millstream_runtime.config import Device
from millstream_runtime.draft_head_tensors import eagle1_name, eagle3_name, names_here
from millstream_runtime.errors import RuntimeFailure
from millstream_runtime.models.eagle import heads
from millstream_runtime.models.medusa.medusa_heads import load_medusa_heads, read_medusa_folder
from millstream_runtime.sources.inspection.inspect import inspect_folder
from tests.support.eagle3_heads import to_eagle3_speculators, write_eagle3_head
from tests.support.eagle_heads import head_config, random_head, save_head, to_speculators
from tests.support.medusa_heads import write_medusa_heads
from tests.support.tiny_model import write_tiny_model

KINDS = (
    *("eagle1", "eagle1-biases", "eagle1-two-layers", "eagle1-speculators"),
    *("eagle3", "eagle3-whole", "eagle3-speculators", "medusa"),
)


@pytest.fixture(params=KINDS)
def head(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A sound head of each kind and layout."""
    target, folder, kind = (
        write_tiny_model(tmp_path / "target", hidden_size=48, intermediate_size=80, head_dim=12),
        tmp_path / "head",
        request.param,
    )
    if kind == "medusa":
        config = json.loads((write_medusa_heads(folder) / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 48, "vocab_size": 199}))
        return folder
    if kind.startswith("eagle3"):
        vocabulary = {"draft_vocab_size": 272} if kind == "eagle3-whole" else {}
        write_eagle3_head(folder, target, **vocabulary)
        return to_eagle3_speculators(folder, tmp_path / "other") if kind == "eagle3-speculators" else folder
    by_kind: dict[str, dict[str, Any]] = {
        "eagle1-biases": {"attention_bias": True, "mlp_bias": True},
        "eagle1-two-layers": {"num_hidden_layers": 2},
    }
    changes = by_kind.get(kind, {})
    folder.mkdir()
    save_head(folder, head_config(target, **changes), random_head(target, **changes))
    if kind == "eagle1-speculators":
        (tmp_path / "other").mkdir()
        to_speculators(folder, tmp_path / "other")
        return tmp_path / "other"
    return folder


def test_a_sound_head_has_nothing_wrong(head: Path) -> None:
    assert "wrong" not in inspect_folder(head)["draft_head"]
    _load(head)


def test_each_tensor_that_is_missing_is_named(head: Path) -> None:
    """In the layout of the file; the runtime refuses each of these heads, too."""
    tensors = load_file(head / "model.safetensors")
    for name in tensors:
        if name in ("t2d", "fc.bias", "fusion_fc.bias"):  # not read, or optional
            continue
        _write(head, {other: one for other, one in tensors.items() if other != name})
        assert _wrong(head) == f"tensor {name} is missing"
        with pytest.raises(RuntimeFailure):
            _load(head)


def test_each_tensor_of_another_size_is_named_with_both_sizes(head: Path) -> None:
    tensors = load_file(head / "model.safetensors")
    for name, tensor in tensors.items():
        if name == "t2d":
            continue
        _write(head, tensors | {name: torch.cat((tensor, tensor[:1]))})
        rest = "".join(f", {size}" for size in tensor.shape[1:])
        wrong = _wrong(head)
        assert wrong is not None
        assert wrong.startswith(f"tensor {name} is [{len(tensor) + 1}{rest}], and config.json makes it [")
        with pytest.raises(RuntimeFailure):
            _load(head)


def test_a_surplus_tensor_is_named(head: Path) -> None:
    tensors = load_file(head / "model.safetensors")
    _write(head, tensors | {"layers.7.extra.weight": torch.zeros(2)})
    assert _wrong(head) == "tensor layers.7.extra.weight is no part of such a head"
    _write(head, tensors | {f"zz.{number}": torch.zeros(2) for number in range(3)})
    assert _wrong(head) == "tensor zz.0 is no part of such a head, nor are 2 others"
    with pytest.raises(RuntimeFailure):
        _load(head)


@pytest.mark.parametrize("layers", [10**9, None, "2", -1, True])
def test_a_number_of_layers_that_is_none_makes_no_tensor_wrong(layers: object, tmp_path: Path) -> None:
    target, head = (
        write_tiny_model(tmp_path / "target", hidden_size=48, intermediate_size=80, head_dim=12),
        tmp_path / "head",
    )
    head.mkdir()
    save_head(head, head_config(target) | {"num_hidden_layers": layers}, random_head(target))
    expected = "tensor layers.1.input_layernorm.weight is missing" if layers == 10**9 else None
    assert _wrong(head) == expected


def test_a_second_tensor_for_one_place_keeps_its_name() -> None:
    assert names_here(["fc.weight", "fusion_fc.weight"], eagle1_name) == {
        "fc.weight": "fc.weight",
        "fusion_fc.weight": "fusion_fc.weight",
    }
    assert names_here(["midlayer.x", "t2d", "layers.0.y"], eagle3_name) == {
        "model.layers.0.x": "midlayer.x",
        "model.layers.0.y": "layers.0.y",
    }


def _wrong(head: Path) -> str | None:
    found: str | None = inspect_folder(head)["draft_head"].get("wrong")
    return found


def _write(head: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: one.contiguous() for name, one in tensors.items()}, head / "model.safetensors")


def _load(head: Path) -> None:
    config, cpu = json.loads((head / "config.json").read_text()), torch.device(Device.CPU.value)
    if "medusa_num_heads" in config:
        load_medusa_heads(read_medusa_folder(head), _target_sizes(config), head, torch.float32, cpu)
    else:
        heads.load(heads.read_head_folder(head), head, torch.float32, cpu)


def _target_sizes(config: dict[str, Any]) -> tuple[int, int]:
    return config["hidden_size"], config["vocab_size"]
