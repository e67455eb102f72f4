"""A Llama-shaped Hugging Face folder, random and tiny: it loads in milliseconds and knows nothing.

Its tokenizer is byte-level without merges, so one token is one byte and a random model writes broken UTF-8 all the
time: the worst case for streaming, on purpose. The embedding has more rows than the tokenizer has tokens, as padded
checkpoints do.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{%- for message in messages %}\n"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('roles are system, user and assistant') }}{%- endif %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

DEFAULT_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 256,
    "eos_token_id": 258,
    "pad_token_id": 256,
}


def write_tiny_model(folder: Path, *, seed: int = 0, scale: float = 0.25, **config_overrides: object) -> Path:
    """Write config.json, model.safetensors, tokenizer.json, tokenizer_config.json and generation_config.json.

    Args:
        scale: standard deviation of the weights; large enough that greedy answers are not one token repeated.
        config_overrides: fields of config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {**DEFAULT_CONFIG, **config_overrides}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    eos = {"eos_token_id": config["eos_token_id"], "bos_token_id": config["bos_token_id"]}
    (folder / "generation_config.json").write_text(json.dumps(eos))
    save_file(_weights(config, seed, scale), folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(folder)
    return folder


def _weights(config: dict[str, object], seed: int, scale: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    size = {name: value for name, value in config.items() if isinstance(value, int)}
    hidden, intermediate, vocabulary = size["hidden_size"], size["intermediate_size"], size["vocab_size"]
    query = size["num_attention_heads"] * size["head_dim"]
    key_value = size["num_key_value_heads"] * size["head_dim"]

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * scale

    weights = {"model.embed_tokens.weight": matrix(vocabulary, hidden), "model.norm.weight": torch.ones(hidden)}
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(vocabulary, hidden)
    for layer in range(size["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, rows, columns in (
            ("self_attn.q_proj", query, hidden),
            ("self_attn.k_proj", key_value, hidden),
            ("self_attn.v_proj", key_value, hidden),
            ("self_attn.o_proj", hidden, query),
            ("mlp.gate_proj", intermediate, hidden),
            ("mlp.up_proj", intermediate, hidden),
            ("mlp.down_proj", hidden, intermediate),
        ):
            weights[f"{prefix}.{name}.weight"] = matrix(rows, columns)
        weights[f"{prefix}.input_layernorm.weight"] = torch.ones(hidden)
        weights[f"{prefix}.post_attention_layernorm.weight"] = torch.ones(hidden)
    return weights


def byte_level_tokenizer() -> Tokenizer:
    """256 bytes, then the three special tokens with ids 256, 257 and 258."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (END_OF_TEXT, IM_START, IM_END)])
    return tokenizer


def _write_tokenizer(folder: Path) -> None:
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
