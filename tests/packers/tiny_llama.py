"""A tiny Llama of random weights for packers to pack, and what it is packed and judged by.

Packers run this module in environments of their own: it needs torch, transformers, tokenizers and safetensors alone.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM

NUM_TOKENS = 32
NUM_SEQUENCES, SEQUENCE_TOKENS = 32, 64
PROMPT_TOKENS = (7, 24)
# Groups of 32 inputs fit every layer. Of the three of `down_proj` the second is cut where two ranks share its inputs.
SIZES: dict[str, Any] = {
    "vocab_size": NUM_TOKENS,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def write_model(folder: Path, dtype: torch.dtype, **sizes: int) -> Path:
    """Write a checkpoint in 16 bits and a tokenizer. Norms differ by input, so that some inputs count more.

    `sizes`: other ones than those of `SIZES`.
    """
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES | sizes, initializer_range=0.15))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("norm.weight"):
                tensor.mul_(torch.exp(0.7 * torch.randn_like(tensor)))
    model.to(dtype).save_pretrained(folder)
    _write_tokenizer(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    vocabulary = {f"w{number}": number for number in range(NUM_TOKENS)}
    Tokenizer(WordLevel(vocabulary, unk_token="w0")).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "pad_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def keep_weights_and_config(packed: Path, kept: Path) -> None:
    """Copy what a runtime computes by, and nothing else: the folders are committed."""
    kept.mkdir(parents=True, exist_ok=True)
    [weights] = packed.glob("*.safetensors")
    shutil.copyfile(weights, kept / "model.safetensors")
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"].get("meta", {}).pop("offload_to_disk_path", None)  # a folder of the machine
    (kept / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")


def with_tokenizer(folder: Path, copy: Path) -> Path:
    """Copy a folder for a library that loads no model without a tokenizer."""
    shutil.copytree(folder, copy)
    if not (copy / "tokenizer.json").exists():
        _write_tokenizer(copy)
    return copy


def quant_method(folder: Path) -> str:
    """Of a packed folder, by its config.json."""
    return str(json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"])


def calibration() -> torch.Tensor:
    """Token ids, int64 `[NUM_SEQUENCES, SEQUENCE_TOKENS]`: each sequence walks on from a token to one of few others."""
    generator = torch.Generator().manual_seed(1)
    steps = torch.randint(1, 6, (NUM_SEQUENCES, SEQUENCE_TOKENS), generator=generator)
    return (steps.cumsum(1) * 7) % NUM_TOKENS


def prompts() -> list[torch.Tensor]:
    """Token ids, int64, that were not among those of the calibration."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, NUM_TOKENS, (length,), generator=generator) for length in PROMPT_TOKENS]


@torch.inference_mode()
def logits_of(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    """Logits of every position, `[tokens, vocabulary]`."""
    logits: torch.Tensor = model(input_ids=prompt.unsqueeze(0)).logits[0]
    return logits.float().contiguous()


def write_expected(path: Path, logits: list[torch.Tensor], quantized: list[torch.Tensor] | None = None) -> None:
    """Write `prompts()` with their logits. `quantized`: those by activations in 8 bits."""
    tensors = {f"prompt.{index}": prompt for index, prompt in enumerate(prompts())}
    for name, group in {"logits": logits, "quantized": quantized or []}.items():
        tensors |= {f"{name}.{index}": one for index, one in enumerate(group)}
    save_file(tensors, path)


def read_expected(path: Path, name: str = "logits") -> list[tuple[list[int], torch.Tensor]]:
    """Prompts with their logits, float32; `name`: `logits` or `quantized`."""
    tensors = load_file(path)
    return [(tensors[f"prompt.{i}"].tolist(), tensors[f"{name}.{i}"]) for i in range(len(PROMPT_TOKENS))]
