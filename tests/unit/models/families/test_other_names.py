"""Models published under another architecture's name, and the language models of Qwen's with a vision tower, answer as
transformers' own classes do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from millstream_operator.catalog.inspected_model import read_answer, read_inspected
from millstream_operator.catalog.read_shape import read_shape
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.models.registry import load_model_config
from millstream_runtime.sources.inspection.inspect import inspect_folder
from millstream_runtime.sources.inspection.shape import to_json
from tests.support.family_cases import dense, rope
from tests.support.tiny_families import (
    VOCABULARY,
    engine_answers,
    make_engine,
    prompts_of,
    reference_answers,
    with_fields,
    write_family,
)

PROMPTS = prompts_of([5, 19, 40])
OTHER_NAMES = {
    "LLaMAForCausalLM": "llama",
    "InternLM3ForCausalLM": "internlm3",
    "IQuestCoderForCausalLM": "iquestcoder",
}
FAMILY_OF = {"qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3"}
MROPE = {"mrope_section": [2, 2, 2], "rope_theta": 10000.0}  # of the six pairs of a head
TOWER = {"depth": 1, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 1, "spatial_merge_size": 1}
TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_vl": TOWER | {"embed_dim": 16, "hidden_size": 48},
    "qwen2_5_vl": TOWER | {"hidden_size": 16, "out_hidden_size": 48, "intermediate_size": 16, "window_size": 8},
    "qwen3_vl": TOWER
    | {"hidden_size": 16, "out_hidden_size": 48, "intermediate_size": 16, "num_position_embeddings": 16}
    | {"deepstack_visual_indexes": [0]},
}


@pytest.mark.deep
@pytest.mark.parametrize("architecture", OTHER_NAMES)
def test_another_name_answers_like_transformers(architecture: str, tmp_path: Path) -> None:
    reference = write_family(tmp_path / "as saved", **dense(OTHER_NAMES[architecture]))
    folder = with_fields(tmp_path / "as saved", tmp_path / "as published", architectures=[architecture])
    expected = reference_answers(reference, PROMPTS, 16)
    assert engine_answers(make_engine(folder), PROMPTS, 16) == expected
    shape, config = read_shape(json.loads((folder / "config.json").read_text())), load_model_config(folder)
    assert (shape.family, shape.architecture, config.architecture) == ("llama", "LlamaForCausalLM", "LlamaForCausalLM")


@pytest.mark.parametrize(
    ("architecture", "field", "value"),
    [
        ("InternLM3ForCausalLM", "bias", True),
        ("InternLM3ForCausalLM", "qkv_bias", True),
        ("IQuestCoderForCausalLM", "clip_qkv", 6.0),
    ],
)
def test_what_another_name_could_do_otherwise_is_refused(
    architecture: str, field: str, value: object, tmp_path: Path
) -> None:
    write_family(tmp_path / "llama", **dense("llama"))
    fields = {"architectures": [architecture], "model_type": OTHER_NAMES[architecture], field: value}
    folder = with_fields(tmp_path / "llama", tmp_path / "other", **fields)
    with pytest.raises(RuntimeFailure, match=field) as caught:
        load_model_config(folder)
    assert caught.value.reason is FailureReason.UNSUPPORTED_BY_RUNTIME


def write_with_tower(folder: Path, model_type: str) -> Any:
    """A model of Qwen's with a tower, as transformers writes it; every parameter random."""
    torch.manual_seed(0)
    parameters = rope("default") | MROPE | ({"mrope_interleaved": True} if model_type == "qwen3_vl" else {})
    text = {key: value for key, value in dense(model_type).items() if key != "model_type"}
    text |= {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    text |= {"rope_parameters": parameters, "initializer_range": 0.2, "rms_norm_eps": 1e-6}
    config = CONFIG_MAPPING[model_type](
        text_config=text,
        vision_config=TOWERS[model_type],
        tie_word_embeddings=False,
        image_token_id=90,
        video_token_id=91,
        vision_start_token_id=92,
        vision_end_token_id=93,
    )
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model


def publish(folder: Path, model_type: str) -> None:
    """Have a folder as the older ones are: fields of the language model outside, its tensors beside `visual.*`."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    text = config.pop("text_config")
    scaling = {"type": "mrope", "mrope_section": MROPE["mrope_section"]}
    del text["rope_parameters"]
    path.write_text(json.dumps({**text, **config, "model_type": model_type, "rope_scaling": scaling}))
    (weights,) = folder.glob("*.safetensors")
    tensors = load_file(weights)
    renamed = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, weights)


@pytest.mark.deep
@pytest.mark.parametrize("model_type", FAMILY_OF)
def test_text_beside_a_tower_of_qwens_answers_like_transformers(model_type: str, tmp_path: Path) -> None:
    prompts = [[token % 90 for token in prompt] for prompt in PROMPTS]  # none of the tokens that stand for images
    expected = reference_answers(write_with_tower(tmp_path, model_type), prompts, 16)
    for is_published in (False, True):
        if is_published and model_type == "qwen3_vl":
            continue  # it is published as transformers writes it
        if is_published:
            publish(tmp_path, model_type)
        assert engine_answers(make_engine(tmp_path), prompts, 16) == expected
        config = load_model_config(tmp_path)
        shape = read_inspected(read_answer(to_json(inspect_folder(tmp_path)))).shape
        assert (shape.family, shape.architecture) == (FAMILY_OF[model_type], config.architecture)
        assert (shape.num_layers, shape.num_heads) == (config.num_layers, config.num_heads)


def test_the_planner_knows_kimi_k2_as_the_model_that_it_is() -> None:
    config = json.loads((Path(__file__).parents[3] / "data" / "model_configs" / "deepseek-v3.json").read_text())
    assert read_shape(config | {"model_type": "kimi_k2"}) == read_shape(config)
