"""`inspect`: the same shape from a hub, an artifact, an image and a folder, and how little of the weights is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millstream_runtime.errors import FailureReason, InvalidConfigError, RuntimeFailure
from millstream_runtime.sources.client import RetryPolicy
from millstream_runtime.sources.hugging_face import HuggingFace
from millstream_runtime.sources.image_source import ImageSource
from millstream_runtime.sources.inspection.inspect import (
    GivenConfig,
    inspect_config,
    inspect_folder,
    inspect_source,
    read_config,
)
from millstream_runtime.sources.inspection.shape import describe, to_json
from millstream_runtime.sources.safetensors_header import WeightsSummary
from tests.support.local_hub import COMMIT, LocalCDN, LocalHub
from tests.support.local_registry import LocalRegistry, tar_of
from tests.support.local_web import Fault
from tests.support.model_files import LLAMA, SHARD_ELEMENTS, SHARDS, model_files, safetensors

ELEMENTS = 2 * SHARD_ELEMENTS - 4


def require_tiny(shape: dict[str, Any]) -> None:
    assert shape["version"] == 1
    assert shape["architectures"] == ["LlamaForCausalLM"]
    assert (shape["model_type"], shape["dtype"], shape["max_position_embeddings"]) == ("llama", "bfloat16", 2048)
    assert shape["config"] == LLAMA
    assert shape["quantization_config"] is None
    assert shape["weights"]["elements_by_dtype"] == {"BF16": ELEMENTS, "I32": 2}
    assert shape["weights"]["elements"] == ELEMENTS + 2
    assert shape["weights"]["tensor_bytes"] == 2 * ELEMENTS + 8
    assert shape["weights"]["file_bytes"] == sum(len(model_files()[name]) for name in SHARDS)
    assert (shape["weights"]["files"], shape["weights"]["tensors"]) == (2, 3)
    assert shape["weights"]["tied_lm_head"] is False
    assert shape["tokenizer"] == {
        "class": "PreTrainedTokenizerFast",
        "model_max_length": None,
        "has_chat_template": True,
    }
    assert shape["generation"] == {"eos_token_id": [2, 3]}
    assert len(to_json(shape).encode()) <= 4096


def test_a_repository_is_described_by_its_headers(hub: LocalHub, cdn: LocalCDN, policy: RetryPolicy) -> None:
    hub.faults.append(Fault("/api/models", status=503))
    shape = inspect_source(HuggingFace("org/tiny", endpoint=hub.url, policy=policy))
    require_tiny(shape)
    assert shape["source"] == {"kind": "huggingFace", "repository": "org/tiny"}
    assert (shape["requested_revision"], shape["revision"]) == ("main", COMMIT)
    assert cdn.sent("/blobs/") <= len(SHARDS) * (128 << 10), "headers, not weights"


def test_an_artifact(registry: LocalRegistry, policy: RetryPolicy) -> None:
    digest = registry.artifact("1", model_files())
    shape = inspect_source(ImageSource(f"{registry.host}/org/tiny:1", policy=policy))
    require_tiny(shape)
    assert shape["revision"] == digest


@pytest.mark.parametrize("compress", [False, True])
def test_an_image(registry: LocalRegistry, policy: RetryPolicy, compress: bool) -> None:
    upper = tar_of([("models/tokenizer.json", b"{}"), ("etc/hosts", b"")])
    registry.image("1", tar_of([(f"models/{k}", v) for k, v in model_files().items()], compress=compress), upper)
    require_tiny(inspect_source(ImageSource(f"{registry.host}/org/tiny:1", policy=policy)))


def test_a_plain_tar_is_skipped_through(registry: LocalRegistry, policy: RetryPolicy) -> None:
    big = {**model_files(), SHARDS[0]: safetensors({"model.a.weight": ("F32", [10 << 20], 40 << 20)})}
    registry.image("1", tar_of([(f"models/{name}", content) for name, content in big.items()]))
    shape = inspect_source(ImageSource(f"{registry.host}/org/tiny:1", policy=policy))
    assert shape["weights"]["elements_by_dtype"]["F32"] == 10 << 20
    assert registry.sent("/blobs/") < 25 << 20, "the rest of 46 MB is what sockets had buffered"


def test_a_folder(tmp_path: Path) -> None:
    for name, content in model_files().items():
        if "/" not in name:
            (tmp_path / name).write_bytes(content)
    shape = inspect_folder(tmp_path)
    require_tiny(shape)
    assert shape["source"] == {"kind": "path", "path": str(tmp_path)}
    assert shape["revision"] is None


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("config.json", b"[1]", "config.json must be a JSON object"),
        ("config.json", b"{", "config.json is not readable JSON"),
        ("config.json", b"[" * 100_000, "config.json is not readable JSON"),
        ("config.json", b'{"rope_theta": NaN}', "rope_theta is nan, which is no number of JSON; correct it"),
        ("config.json", b'{"rope_scaling": {"factor": 1e999}}', "rope_scaling.factor is inf"),
        ("config.json", b'{"vocab_size": 8, "vocab_size": 9}', "vocab_size is given twice, as 8 and as 9"),
        ("config.json", b'{"quantization_config": "awq"}', "quantization_config is 'awq'; it must be an object"),
        ("config.json", b'{"quantization_config": []}', r"quantization_config is \[\]; it must be an object"),
        ("config.json", b'{"text_config": {"quantization_config": 4}}', "text_config.quantization_config is 4"),
        ("model.safetensors", b"", "is not a safetensors file"),
        ("model.safetensors", b"\xff" * 64, "is not a safetensors file"),
        ("model.safetensors", safetensors({"a": ("F32", [100], 400)})[:-1], "is cut"),
        ("model.safetensors", safetensors({"a": ("F32", [100], 404)}), "describes tensor 'a'"),
        ("model.safetensors", safetensors({"a": ("F32", [-1, -100], 400)}), "describes tensor 'a'"),
        ("model.safetensors", b"\x03" + bytes(7) + b"[1]", "not a JSON object"),
        ("model.safetensors.index.json", b"[]", "is not a JSON object with weight_map"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": ["b"]}}', "is not a JSON object with weight_map"),
    ],
)
def test_a_damaged_folder_is_named(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors").write_bytes(safetensors({"a": ("F32", [100], 400)}))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RuntimeFailure, match=says) as caught:
        inspect_folder(tmp_path)
    assert caught.value.reason is FailureReason.CHECKPOINT_INVALID


@pytest.mark.parametrize(
    "lie",
    [
        {"dtype": ["F32"]},
        {"dtype": {}},
        {"dtype": None},
        {"dtype": "X" * 100_000},
        {"shape": [10**4000] * 3000},  # a product that takes minutes
        {"shape": [1] * 100_000},
        {"shape": [0], "data_offsets": [10**4000, 10**4000]},
        {"shape": [True], "data_offsets": [0, 4]},
        {"shape": "abc"},
        {"data_offsets": "ab"},
    ],
    ids=lambda lie: ",".join(lie),
)
def test_a_header_of_other_types_or_of_huge_numbers_is_one_short_sentence(tmp_path: Path, lie: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    header = json.dumps({"a": {"dtype": "F32", "shape": [100], "data_offsets": [0, 400]} | lie}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(400))
    with pytest.raises(RuntimeFailure, match="describes tensor 'a' in a way that no safetensors file does") as caught:
        inspect_folder(tmp_path)
    assert len(caught.value.message) < 300


def test_types_that_nobody_knows_yet_are_counted_within_the_limit_of_the_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    header = json.dumps({f"t{i}": {"dtype": f"NEW{i}", "shape": [1], "data_offsets": [0, 1]} for i in range(5000)})
    content = len(header).to_bytes(8, "little") + header.encode() + b"\0"
    (tmp_path / "model.safetensors").write_bytes(content)
    assert len(to_json(inspect_folder(tmp_path)).encode()) <= 4096


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(RuntimeFailure, match="does not exist"):
        inspect_folder(tmp_path / "none")


def described(config: dict[str, Any]) -> dict[str, Any]:
    return describe({"kind": "path"}, None, None, {"config.json": json.dumps(config).encode()}, WeightsSummary())


def test_a_multimodal_models_decoder_and_quantisation_are_found() -> None:
    quantization = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "modules_to_not_convert": None,
    }
    shape = described(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "quantization_config": quantization,
            "vision_config": {"hidden_size": 1152},
            "text_config": {"hidden_size": 5376, "max_position_embeddings": 131072, "dtype": "bfloat16"},
        }
    )
    assert shape["config"]["text_config"]["hidden_size"] == 5376
    assert (shape["dtype"], shape["max_position_embeddings"]) == ("bfloat16", 131072)
    assert shape["quantization_config"] == {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    assert "vision_config" not in shape["config"]


def test_a_shape_never_exceeds_what_the_kubelet_keeps() -> None:
    """Whatever somebody wrote into a config.json."""
    words = ["Ä" * 300, "\ud800", 1e300] * 100
    hostile = dict.fromkeys(("architectures", "bos_token_id", "eos_token_id", "rope_scaling", "hidden_act"), words)
    shape = described(
        {**LLAMA, **hostile, "architectures": ["X"], "layer_types": ["full_attention"] * 80, "hidden_size": 7}
    )
    shape["quantization_config"] = {"quant_method": "gptq", "bits": 4, "ignore": [f"module.{i}" * 9 for i in range(99)]}
    text = to_json(shape)
    assert len(text.encode()) <= 4096
    fitted = json.loads(text)
    assert fitted["config"]["hidden_size"] == 7, "sizes stay"
    assert fitted["config"]["layer_types"] == {"full_attention": 80}
    assert fitted["quantization_config"] == {"quant_method": "gptq", "bits": 4}
    assert "quantization_config.ignore" in fitted["omitted"]


def test_a_persons_config_stands_for_the_models_own(tmp_path: Path) -> None:
    """The sizes are still counted in the folder; the shape is what the person says."""
    for name, content in model_files().items():
        if "/" not in name:
            (tmp_path / name).write_bytes(content)
    (tmp_path / "config.json").write_text("no JSON at all")
    shape = inspect_folder(tmp_path, GivenConfig(tmp_path, b'{"model_type": "qwen2", "hidden_size": 7}'))
    assert (shape["model_type"], shape["config"]["hidden_size"]) == ("qwen2", 7)
    assert shape["weights"]["tensors"] > 0


def test_a_config_alone_has_no_weights_and_no_revision(tmp_path: Path) -> None:
    shape = inspect_config(GivenConfig(tmp_path, b'{"model_type": "llama", "hidden_size": 8}'))
    assert (shape["config"]["hidden_size"], shape["weights"]["file_bytes"], shape["revision"]) == (8, 0, None)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_an_encoding_that_the_runtime_does_not_read_is_refused_before_the_download(
    tmp_path: Path, encoding: str
) -> None:
    with pytest.raises(RuntimeFailure, match="not readable JSON"):
        inspect_config(GivenConfig(tmp_path / "config.json", json.dumps(LLAMA).encode(encoding)))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"{", "{path} is not readable JSON"),
        (b"[]", "{path} must be a JSON object"),
        (
            b'{"rope_theta": NaN}',
            "{path} is not readable JSON: rope_theta is nan, which is no number of JSON; correct it.",
        ),
        (b'{"quantization_config": 4}', "{path}: quantization_config is 4; it must be an object"),
        (b" " * ((16 << 20) + 1), "{path} is larger than"),
    ],
    ids=["no JSON", "a list", "NaN", "quantization_config", "too large"],
)
@pytest.mark.parametrize("is_alone", [True, False])
def test_a_given_config_is_named_as_it_was_given(tmp_path: Path, text: bytes, says: str, is_alone: bool) -> None:
    for name, content in model_files().items():
        if "/" not in name:
            (tmp_path / name).write_bytes(content)
    path = tmp_path / "my-shape.json"
    path.write_bytes(text)
    with pytest.raises(RuntimeFailure) as caught:
        inspect_config(read_config(path)) if is_alone else inspect_folder(tmp_path, read_config(path))
    assert says.format(path=path) in caught.value.message
    assert " config.json" not in caught.value.message


def test_a_config_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match=r"shape/config\.json"):
        read_config(tmp_path / "shape/config.json")


def test_a_long_list_of_modules_is_counted_by_module_and_not_by_layer(tmp_path: Path) -> None:
    from millstream_operator.catalog.checkpoint_quantization import read_quantization

    kept = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(80) for name in "qkvo"]
    quantization = {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head", *kept]}
    config = json.dumps(LLAMA | {"quantization_config": quantization})
    shape = inspect_config(GivenConfig(tmp_path / "config.json", config.encode()))
    assert shape["quantization_config"]["modules_to_not_convert"] == {
        "lm_head": 1,
        **{f"model.layers.*.self_attn.{name}_proj": 80 for name in "qkvo"},
    }
    read = read_quantization(shape)
    assert read is not None
    assert ("model.layers.*.self_attn.q_proj", 80) in read.kept
