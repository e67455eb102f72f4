"""A Ministral, by its name or as transformers' AutoConfig makes it of a `mistral` with `layer_types`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from millstream_operator.catalog.read_shape import read_shape
from millstream_runtime.models.registry import load_model_config
from tests.support.family_cases import WINDOW, dense
from tests.support.tiny_families import model_logits, prompts_of, reference_logits, with_fields, write_family

TYPES = ["sliding_attention", "full_attention"]


NAMES = {"model_type": "ministral", "architectures": ["MinistralForCausalLM"]}


@pytest.mark.parametrize("names", [{}, NAMES], ids=["mistral", "ministral"])
@pytest.mark.parametrize("types", [TYPES, TYPES[::-1], ["full_attention"] * 2, None], ids=str)
def test_the_layers_with_a_window_are_those_of_transformers(
    types: list[str] | None, names: dict[str, Any], tmp_path: Path
) -> None:
    write_family(tmp_path / "made", **dense("mistral", **WINDOW))
    folder = with_fields(tmp_path / "made", tmp_path / "model", layer_types=types, **names)
    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    assert AutoConfig.from_pretrained(folder).model_type == "ministral"
    (prompt,) = prompts_of([40])
    ours = model_logits(folder, prompt, 13)
    torch.testing.assert_close(ours, reference_logits(reference, prompt), atol=1e-4, rtol=0)
    windows = load_model_config(folder).windows
    by_layer = tuple(11 if one == "sliding_attention" else None for one in types or [TYPES[0]] * 2)
    assert windows == (by_layer if any(by_layer) else ())
    shape = read_shape(json.loads((folder / "config.json").read_text()))
    assert sorted(map(str, shape.windows)) == sorted(map(str, windows))


def test_the_language_model_of_a_tower_is_a_mistral_whatever_its_types(tmp_path: Path) -> None:
    """transformers makes it without AutoConfig's rule."""
    write_family(tmp_path / "made", **dense("mistral", **WINDOW))
    text = json.loads((tmp_path / "made" / "config.json").read_text()) | {"layer_types": ["full_attention"] * 2}
    outer = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": text}
    (tmp_path / "made" / "config.json").write_text(json.dumps(outer))
    assert load_model_config(tmp_path / "made").windows == (11, 11)
    outer["text_config"] = text | {"model_type": "ministral", "layer_types": TYPES}
    (tmp_path / "made" / "config.json").write_text(json.dumps(outer))
    assert load_model_config(tmp_path / "made").windows == (11, None), "its own name makes it a Ministral"
