"""What runs under llm-compressor's Python (`make packers`): it packs the tiny Llama and computes what a folder holds.

python -m tests.packers.llm_compressor_side pack FOLDER        a folder and expected logits per entry of `recipes`
python -m tests.packers.llm_compressor_side logits FOLDER FILE  a folder's logits of `tiny_llama.prompts`
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import disable_quantization
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from tests.packers import tiny_llama

if not torch.cuda.is_available():
    # AWQ pins tensors for copies to a GPU, which is an error where there is no driver. It changes no number.
    IntermediatesCache.pin_memory = lambda self, batch_index, input_names=None: None


def recipes() -> dict[str, list[Any]]:
    """By name of the folder."""
    ignore = ["lm_head"]
    return {
        "w4a16-gptq": [GPTQModifier(config_groups=_four_bits(actorder="weight"), ignore=ignore)],
        "w4a16-awq-zero-points": [
            AWQModifier(),
            QuantizationModifier(config_groups=_four_bits(symmetric=False), ignore=ignore),
        ],
        "w8a8-smoothquant": [
            SmoothQuantModifier(smoothing_strength=0.8),
            GPTQModifier(targets="Linear", scheme="W8A8", ignore=ignore),
        ],
        "fp8-static": [QuantizationModifier(targets="Linear", scheme="FP8", ignore=ignore)],
        "fp8-dynamic": [QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC", ignore=ignore)],
    }


def _four_bits(**weights: Any) -> dict[str, Any]:
    group = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    return {"group_0": {"targets": ["Linear"], "weights": group | weights}}


def pack(root: Path, name: str) -> None:
    """Write `root/NAME` and `root/NAME.expected.safetensors`, as `recipes` says."""
    torch.manual_seed(0)
    ids = tiny_llama.calibration()
    data = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()})
    with tempfile.TemporaryDirectory() as scratch:
        plain = tiny_llama.write_model(Path(scratch) / "plain", torch.bfloat16)
        oneshot(
            model=AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16),
            tokenizer=str(plain),
            dataset=data,
            recipe=recipes()[name],
            max_seq_length=tiny_llama.SEQUENCE_TOKENS,
            num_calibration_samples=tiny_llama.NUM_SEQUENCES,
            shuffle_calibration_samples=False,
            output_dir=f"{scratch}/packed",
        )
        tiny_llama.keep_weights_and_config(Path(scratch) / "packed", root / name)
    tiny_llama.write_expected(root / f"{name}.expected.safetensors", logits(root / name), quantized(root / name))


def logits(folder: Path) -> list[torch.Tensor]:
    """Logits of a folder: weights dequantized by compressed-tensors, scales and products in float32."""
    model = _load(folder)
    model.apply(disable_quantization)  # of activations
    return [tiny_llama.logits_of(model, prompt) for prompt in tiny_llama.prompts()]


def quantized(folder: Path) -> list[torch.Tensor]:
    """The same with activations rounded as the folder's config asks for it."""
    model = _load(folder)
    return [tiny_llama.logits_of(model, prompt) for prompt in tiny_llama.prompts()]


def _load(folder: Path) -> Any:
    config = CompressedTensorsConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config).eval()


if __name__ == "__main__":
    action, folder, *file = sys.argv[1:]
    if action == "pack":
        for name in recipes():
            pack(Path(folder), name)
    else:
        tiny_llama.write_expected(Path(file[0]), logits(Path(folder)))
