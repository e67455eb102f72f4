"""The language model of a model with a vision tower: its text answers equal those of transformers, in both spellings
of its tensors, and nothing of the vision tower is read."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
)

from millstream_operator.catalog.read_shape import read_shape
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.models.registry import load_model, load_model_config
from tests.support.family_cases import dense, rope
from tests.support.tiny_families import engine_answers, make_engine, prompts_of, reference_answers, with_fields

pytestmark = pytest.mark.deep

TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
IMAGES = {"image_size": 28, "patch_size": 14}
VOCABULARY = {"vocab_size": 97, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
TEXT = {
    "gemma3": dense(
        "gemma3_text",
        num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window=11,
        tie_word_embeddings=True,
        rope_parameters={
            "full_attention": rope("linear", factor=4.0) | {"rope_theta": 1000.0},
            "sliding_attention": rope("default") | {"rope_theta": 100.0},
        },
    ),
    "mistral3": dense("mistral", sliding_window=None),
}


def text_config(name: str) -> dict[str, Any]:
    return TEXT[name] | VOCABULARY | {"initializer_range": 0.2}


def make(name: str) -> Any:
    torch.manual_seed(0)
    if name == "gemma3":
        text = {key: value for key, value in text_config(name).items() if key != "model_type"}
        gemma = Gemma3Config(text_config=text, vision_config=TOWER | IMAGES, mm_tokens_per_image=4)
        model: Any = Gemma3ForConditionalGeneration(gemma)
    else:
        tower = TOWER | IMAGES | {"model_type": "pixtral", "head_dim": 8}
        mistral = Mistral3Config(text_config=text_config(name), vision_config=tower, tie_word_embeddings=False)
        model = Mistral3ForConditionalGeneration(mistral)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def newer_spelling(name: str) -> str:
    """`language_model.model.*` as transformers names it since 4.52: `model.language_model.*`."""
    if name.startswith("language_model.model."):
        return "model.language_model." + name.removeprefix("language_model.model.")
    return name.removeprefix("language_model.") if name.startswith("language_model.") else f"model.{name}"


@pytest.fixture(params=TEXT)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def write(folder: Path, name: str, spelling: str) -> Any:
    model = make(name)
    model.save_pretrained(folder)
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    assert any(key.startswith("language_model.model.") for key in tensors)
    if spelling == "newer":
        save_file({newer_spelling(key): value for key, value in tensors.items()}, path)
    return model


@pytest.mark.parametrize("spelling", ["older", "newer"])
def test_text_answers_equal_those_of_transformers(
    name: str, spelling: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference = write(tmp_path, name, spelling)
    prompts = prompts_of([5, 19, 40])
    with caplog.at_level(logging.INFO, logger="millstream"):
        engine = make_engine(tmp_path)
    assert engine_answers(engine, prompts, 16) == reference_answers(reference, prompts, 16)
    (said,) = [record for record in caplog.records if record.message == "text_only"]
    skipped = getattr(said, "fields", {})
    assert skipped["tensors"] == sum(
        "vision" in key or "projector" in key for path in tmp_path.glob("*.safetensors") for key in load_file(path)
    )


def test_damage_in_the_vision_tower_does_not_matter_and_in_the_text_model_it_does(name: str, tmp_path: Path) -> None:
    write(tmp_path, name, "older")
    (path,) = tmp_path.glob("*.safetensors")
    tensors = load_file(path)
    for key, tensor in tensors.items():
        if not key.startswith("language_model."):
            tensor.fill_(float("nan"))
    save_file(tensors, path)
    config = load_model_config(tmp_path)
    load_model(config, tmp_path, torch.float32, torch.device("cpu"))
    lost = "language_model.model.layers.1.mlp.down_proj.weight"
    save_file({key: value for key, value in tensors.items() if key != lost}, path)
    with pytest.raises(RuntimeFailure, match=r"layers\.1\.mlp\.down_proj\.weight"):
        load_model(config, tmp_path, torch.float32, torch.device("cpu"))


def test_the_planner_sizes_the_family_that_runs(name: str, tmp_path: Path) -> None:
    write(tmp_path, name, "older")
    shape = read_shape(json.loads((tmp_path / "config.json").read_text()))
    config = load_model_config(tmp_path)
    assert shape.architecture == config.architecture
    assert shape.num_layers == config.num_layers
    assert shape.longest_context_tokens == config.longest_context_tokens


def test_another_language_model_behind_the_same_tower_is_refused(tmp_path: Path) -> None:
    """Ministral 3 is published as Mistral3ForConditionalGeneration too, and its attention is not Mistral's."""
    write(tmp_path / "one", "mistral3", "older")
    text = json.loads((tmp_path / "one" / "config.json").read_text())["text_config"]
    other = with_fields(tmp_path / "one", tmp_path / "other", text_config=text | {"model_type": "ministral3"})
    with pytest.raises(RuntimeFailure) as caught:
        load_model_config(other)
    assert caught.value.reason is FailureReason.UNSUPPORTED_BY_RUNTIME
    assert "text_config.model_type 'ministral3'" in caught.value.message
    bare = with_fields(tmp_path / "one", tmp_path / "bare", text_config=None)
    with pytest.raises(RuntimeFailure, match="text_config is missing"):
        load_model_config(bare)
