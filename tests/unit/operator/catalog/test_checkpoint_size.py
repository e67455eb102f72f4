"""The weights files and the config.json belong together, or the model is refused with both figures."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from millstream_operator.catalog.config_fields import ConfigError
from millstream_operator.catalog.inspected_model import read_inspected

CONFIGS = Path(__file__).resolve().parents[3] / "data" / "model_configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))
BYTES = {"F32": 4, "BF16": 2, "F16": 2, "I32": 4, "U8": 1, "F8_E4M3": 1}


def config(name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    return values


def tensors_of(name: str) -> dict[str, int]:
    """The checkpoint's tensors as transformers saves them: tied weights once."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = config(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    return {key: parameter.numel() for key, parameter in model.named_parameters()}


def inspected(values: dict[str, Any], elements: dict[str, int], *, tied: bool = False) -> Any:
    size = sum(BYTES[dtype] * count for dtype, count in elements.items())
    weights = {
        "files": 4,
        "file_bytes": size + (1 << 20),
        "tensor_bytes": size,
        "elements_by_dtype": elements,
        "tied_lm_head": tied,
    }
    quantization = values.pop("quantization_config", None)
    return read_inspected(
        {"version": 1, "revision": None, "config": values, "quantization_config": quantization, "weights": weights}
    )


def refusal(values: dict[str, Any], elements: dict[str, int], *, tied: bool = False) -> str:
    with pytest.raises(ConfigError) as caught:
        inspected(values, elements, tied=tied)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_every_published_model_belongs_to_its_own_files_and_to_no_others(name: str) -> None:
    tensors = tensors_of(name)
    count = sum(tensors.values())
    tied = not any(key.endswith(("lm_head.weight", "embed_out.weight")) for key in tensors)
    embedding = max(size for key, size in tensors.items() if "embed" in key)
    inspected(config(name), {"BF16": count}, tied=tied)
    inspected(config(name), {"F32": count}, tied=tied)  # stored in float32, served in what config.json says
    inspected(config(name), {"BF16": count, "U8": count // 4, "I32": 7}, tied=tied)  # causal masks, buffers
    if tied:
        inspected(config(name), {"BF16": count + embedding}, tied=False)  # the tied head is stored, too
    for wrong in (count * 104 // 100, count * 96 // 100, count * 2):
        if "deepseek-v3" not in name or wrong < count:
            assert "more than 3 % apart" in refusal(config(name), {"BF16": wrong}, tied=tied)


def test_both_figures_and_the_cure_are_in_one_line() -> None:
    said = refusal(config("llama-3-70b"), {"BF16": 8_030_261_248})
    assert "describes 141.11 GB of weights (70.55 billion in 16 bit)" in said
    assert "the weights files hold 16.06 GB" in said
    assert "model.configMapRef" in said


def test_deepseek_v3_in_block_fp8_with_its_draft_head_is_what_the_hub_says() -> None:
    values = config("deepseek-v3") | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    values["num_nextn_predict_layers"] = 1
    published_bytes = 688_586_727_753  # metadata.total_size of its index
    assert inspected(dict(values), {"U8": published_bytes}).shape.quantization.method == "FP8"
    without_head = published_bytes - 14_000_000_000
    inspected(dict(values), {"U8": without_head})
    assert "more than 3 % apart" in refusal(dict(values), {"U8": published_bytes // 2})


@pytest.mark.parametrize("name", ["llama-3-70b", "qwen2.5-7b", "mixtral-8x7b", "llama-2-7b"])
@pytest.mark.parametrize("method", ["awq", "gptq", "nf4", "nf4-double", "fp8"])
def test_quantised_files_are_counted_with_their_scales(name: str, method: str) -> None:
    quantizations: dict[str, dict[str, Any]] = {
        "awq": {"quant_method": "awq", "bits": 4, "group_size": 128},
        "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
        "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True},
        "nf4-double": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
        "fp8": {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]},
    }
    values = config(name) | {"quantization_config": quantizations[method]}
    elements: Counter[str] = Counter()
    for key, count in tensors_of(name).items():
        is_linear = (key.endswith("weight") or "experts" in key) and not any(
            word in key for word in ("embed", "lm_head", "norm", "mlp.gate.weight", "block_sparse_moe.gate.weight")
        )
        if not is_linear:
            elements["BF16"] += count
        elif method == "fp8":
            elements["F8_E4M3"] += count
        elif method.startswith("nf4"):
            elements["U8"] += count // 2 + (count // 64 if "double" in method else 0)
            elements["F32"] += count // 16384 if "double" in method else count // 64
        else:  # packed weights, packed zero points, scales; GPTQ: the order of the columns
            elements["I32"] += count // 8 + count // 128 // 8 + (4096 if method == "gptq" else 0)
            elements["F16"] += count // 128
    inspected(dict(values), dict(elements))
    doubled = {dtype: 2 * count for dtype, count in elements.items()}
    assert "more than 3 % apart" in refusal(dict(values), doubled)


def test_a_model_with_a_vision_tower_may_hold_more_and_not_less() -> None:
    language = config("gemma-3-1b")
    values = {"model_type": "gemma3", "text_config": language}
    count = sum(tensors_of("gemma-3-1b").values())
    inspected(dict(values), {"BF16": count + 420_000_000}, tied=True)
    assert "more than 3 % apart" in refusal(dict(values), {"BF16": count // 2}, tied=True)


@pytest.mark.parametrize("weights", [None, {}, {"tensor_bytes": 0, "elements_by_dtype": {}}, {"tensor_bytes": "many"}])
def test_where_nothing_was_counted_nothing_is_compared(weights: Any) -> None:
    answer = {"version": 1, "revision": None, "config": config("llama-3-70b"), "weights": weights}
    assert read_inspected(answer).checkpoint_bytes is None
