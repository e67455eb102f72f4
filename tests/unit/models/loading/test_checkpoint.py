"""A bad model folder is refused by one sentence that names the file and the tensor or field."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from millstream_runtime.errors import FailureReason, RuntimeFailure
from tests.support.engines import MakeEngine, WriteModel, generate, greedy, requests_for

Tensors = dict[str, torch.Tensor]
GATE = "model.layers.1.mlp.gate_proj.weight"


@pytest.fixture
def folder(tmp_path: Path, write_model: WriteModel) -> Path:
    return shutil.copytree(write_model(), tmp_path / "model")


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))


def refusal(folder: Path, make_engine: MakeEngine) -> RuntimeFailure:
    with pytest.raises(RuntimeFailure) as caught:
        make_engine(folder)
    message = caught.value.message
    assert "\n" not in message
    assert message.endswith(".")
    return caught.value


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda t: t.pop(GATE), f"tensor {GATE} [80, 48] is missing"),
        (lambda t: t.update({GATE: t[GATE][:79].clone()}), "has shape [79, 48]; config.json asks for [80, 48]"),
        (lambda t: t.update({GATE: t[GATE].to(torch.int8)}), "is I8; it must be one of"),
    ],
    ids=["missing", "shape", "dtype"],
)
def test_tensors_are_checked(
    folder: Path, make_engine: MakeEngine, edit: Callable[[Tensors], object], says: str
) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    failure = refusal(folder, make_engine)
    assert failure.reason is FailureReason.CHECKPOINT_INVALID
    assert says in failure.message
    assert GATE in failure.message


@pytest.mark.parametrize("keep_bytes", [0, 5, 200, -1000])
def test_a_truncated_file_is_named(folder: Path, make_engine: MakeEngine, keep_bytes: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep_bytes])
    failure = refusal(folder, make_engine)
    assert failure.reason is FailureReason.CHECKPOINT_INVALID
    assert "model.safetensors" in failure.message
    assert "truncated or corrupt" in failure.message


def test_noise_instead_of_a_header_is_named(folder: Path, make_engine: MakeEngine) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 4096)
    assert "truncated or corrupt" in refusal(folder, make_engine).message


def test_pickled_weights_are_refused_unread(folder: Path, make_engine: MakeEngine) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    failure = refusal(folder, make_engine)
    assert "pytorch_model.bin" in failure.message
    assert "safetensors" in failure.message


def test_missing_files_are_named(folder: Path, make_engine: MakeEngine) -> None:
    (folder / "model.safetensors").unlink()
    assert "no *.safetensors file" in refusal(folder, make_engine).message
    (folder / "config.json").unlink()
    assert "config.json does not exist" in refusal(folder, make_engine).message
    assert "does not exist" in refusal(folder / "nowhere", make_engine).message


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/etc/passwd", "gone.safetensors", 7])
def test_an_index_reads_only_its_own_folder(folder: Path, make_engine: MakeEngine, shard: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {GATE: shard}}))
    failure = refusal(folder, make_engine)
    assert failure.reason is FailureReason.CHECKPOINT_INVALID
    assert str(shard) in failure.message


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ("[" * 100_000, "is not a JSON object with weight_map, which maps names of tensors to files"),
        (json.dumps({"weight_map": {GATE: f"{'long' * 80}.safetensors"}}), "but does not exist"),
    ],
    ids=["nested", "a name too long for a file"],
)
def test_an_index_that_is_none_is_refused(folder: Path, make_engine: MakeEngine, index: str, says: str) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    assert says in refusal(folder, make_engine).message


def test_a_pointer_of_git_lfs_is_called_so(folder: Path, make_engine: MakeEngine) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"
    (folder / "model.safetensors").write_text(pointer)
    assert "is a git-lfs pointer, not the weights; fetch it with LFS" in refusal(folder, make_engine).message


def test_what_is_no_file_is_refused_unless_an_index_leaves_it_out(folder: Path, make_engine: MakeEngine) -> None:
    """A pipe would never end, and a link may lead to a file that was not fetched."""
    os.mkfifo(folder / "other.safetensors")
    assert "other.safetensors is no file, or a link to none" in refusal(folder, make_engine).message
    (folder / "a-link.safetensors").symlink_to("nowhere")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {GATE: "model.safetensors"}}))
    make_engine(folder)


def test_two_files_with_tensors_of_one_name_are_of_two_models(folder: Path, make_engine: MakeEngine) -> None:
    """`model.safetensors` is what other loaders read; of two others nobody knows which is meant."""
    answers = generate(make_engine(folder), requests_for([[1, 2, 3]], greedy(4)))
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {GATE: torch.ones(80, 48)}, folder / "other.safetensors")
    assert generate(make_engine(folder), requests_for([[1, 2, 3]], greedy(4))) == answers
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    message = refusal(folder, make_engine).message
    assert "weights.safetensors: tensor " in message
    assert " is in other.safetensors, too" in message


@pytest.mark.parametrize(
    ("fields", "reason", "says"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, FailureReason.UNSUPPORTED_BY_RUNTIME, "'GPT2LMHeadModel'"),
        ({"architectures": []}, FailureReason.CHECKPOINT_INVALID, "architectures"),
        ({"hidden_act": "gelu"}, FailureReason.UNSUPPORTED_BY_RUNTIME, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "quip"}}, FailureReason.UNSUPPORTED_BY_RUNTIME, "'quip'"),
        ({"quantization_config": {"quant_method": "awq"}}, FailureReason.CHECKPOINT_INVALID, "q_proj.qweight [48, 6]"),
        ({"quantization_config": "awq"}, FailureReason.CHECKPOINT_INVALID, "quantization_config is 'awq'"),
        ({"quantization_config": []}, FailureReason.CHECKPOINT_INVALID, "quantization_config is []"),
        ({"rope_theta": float("nan")}, FailureReason.CHECKPOINT_INVALID, "rope_theta is nan"),
        ({"rope_parameters": {"rope_type": "proportional"}}, FailureReason.UNSUPPORTED_BY_RUNTIME, "'proportional'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, FailureReason.CHECKPOINT_INVALID, "rope_parameters.factor"),
        ({"hidden_size": ...}, FailureReason.CHECKPOINT_INVALID, "hidden_size is None"),
        ({"hidden_size": "48"}, FailureReason.CHECKPOINT_INVALID, "hidden_size is '48'"),
        ({"num_key_value_heads": 3}, FailureReason.CHECKPOINT_INVALID, "num_key_value_heads is 3"),
        ({"head_dim": 15}, FailureReason.CHECKPOINT_INVALID, "head_dim is 15"),
        ({"eos_token_id": "x"}, FailureReason.CHECKPOINT_INVALID, "eos_token_id is 'x'"),
    ],
)
def test_config_fields_are_checked(
    folder: Path, make_engine: MakeEngine, fields: dict[str, Any], reason: FailureReason, says: str
) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    edit_config(folder, **fields)
    failure = refusal(folder, make_engine)
    assert failure.reason is reason
    assert says in failure.message


def test_a_number_that_no_float_holds_is_refused(folder: Path, make_engine: MakeEngine) -> None:
    edit_config(folder, rms_norm_eps=10**308)
    assert "config.json is not readable JSON: a number has 309 digits" in refusal(folder, make_engine).message


def test_config_that_is_not_json_is_named(folder: Path, make_engine: MakeEngine) -> None:
    (folder / "config.json").write_text('{"vocab_size": ')
    assert "config.json is not readable JSON" in refusal(folder, make_engine).message
