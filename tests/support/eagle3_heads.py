"""Folders with small EAGLE-3 heads, and what such a head drafts, computed anew by transformers' layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from tests.support.eagle_heads import head_config, save_head

DRAFT_VOCAB_SIZE = 64
NORMS = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")


def eagle3_config(target: Path, **overrides: Any) -> dict[str, Any]:
    """config.json of a head in the published layout."""
    names = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB_SIZE}
    return head_config(target, **(names | overrides))


def random_eagle3_head(config: dict[str, Any], seed: int = 3) -> dict[str, Tensor]:
    """Tensors by the published names; the draft vocabulary is every third token, and the last ones."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, vocabulary, drafts = (
        config[name] for name in ("hidden_size", "intermediate_size", "vocab_size", "draft_vocab_size")
    )
    heads, kv = (config[name] * hidden // config["num_attention_heads"] for name in HEADS)
    shapes = {
        "fc": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj": (heads, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
        "lm_head": (drafts, hidden),
    }
    tensors = {f"{name}.weight": 0.15 * torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    tensors |= {f"{name}.weight": 1 + 0.1 * torch.randn(hidden, generator=generator) for name in NORMS}
    if drafts < vocabulary:
        tokens = torch.cat((torch.arange(0, 3 * (drafts - 4), 3), torch.arange(vocabulary - 4, vocabulary)))
        tensors["d2t"] = tokens - torch.arange(drafts)
        tensors["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, tokens, True)
    return tensors


HEADS = ("num_attention_heads", "num_key_value_heads")


def write_eagle3_head(folder: Path, target: Path, **overrides: Any) -> Path:
    """A seeded random head of the target, in the published layout."""
    folder.mkdir(exist_ok=True)
    config = eagle3_config(target, **overrides)
    save_head(folder, config, random_eagle3_head(config))
    return folder


def to_eagle3_speculators(folder: Path, out: Path) -> Path:
    """The same head in the layout of `speculators`."""
    out.mkdir(exist_ok=True)
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    moved = {"draft_vocab_size", "norm_before_residual", "eagle_aux_hidden_state_layer_ids", "architectures"}
    outer = {name: config[name] for name in moved & {*config}} | {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "target_hidden_size": None,
        "transformer_layer_config": {name: value for name, value in config.items() if name not in moved},
    }
    renamed = {
        f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name: tensor
        for name, tensor in tensors.items()
    }
    save_head(out, outer, renamed)
    return out


class Eagle3Reference:
    """What a head of a Llama drafts behind known tokens, computed anew each time, in float32."""

    def __init__(self, target: Path, head: Path) -> None:
        values = json.loads((head / "config.json").read_text())
        config = LlamaConfig(**values, attn_implementation="eager")
        tensors = load_file(head / "model.safetensors")
        self._target = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        layers = self._target.config.num_hidden_layers
        self._layer_ids = values.get("eagle_aux_hidden_state_layer_ids") or (2, layers // 2, layers - 3)
        self._norm_before_residual = values.get("norm_before_residual", False)
        self._layer = LlamaDecoderLayer(config, 0).eval()
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = tensors[f"midlayer.self_attn.{name}.weight"]
            setattr(self._layer.self_attn, name, nn.Linear(weight.shape[1], weight.shape[0], bias=False))
        own = {name.removeprefix("midlayer."): one for name, one in tensors.items() if name.startswith("midlayer.")}
        hidden_norm = own.pop("hidden_norm.weight")
        self._layer.load_state_dict(own)
        self._hidden_norm, self._norm = (LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2))
        self._hidden_norm.weight.data, self._norm.weight.data = hidden_norm, tensors["norm.weight"]
        self._fc, self._head = tensors["fc.weight"], tensors["lm_head.weight"]
        self._d2t = tensors.get("d2t", torch.zeros(len(self._head), dtype=torch.int64))
        self._rotary = LlamaRotaryEmbedding(config)

    def drafts(self, token_ids: list[int], count: int) -> list[int]:
        """The `count` tokens that follow."""
        return self._compute(token_ids, [], count)[0]

    def ranked(self, token_ids: list[int], path: list[int], count: int) -> list[int]:
        """The `count` most probable tokens behind the known ones and the drafts of a path, the first before the
        second."""
        drafts = self._compute(token_ids, path, len(path) + 1)[1].topk(count).indices
        found: list[int] = (drafts + self._d2t[drafts]).tolist()
        return found

    @torch.no_grad()
    def _compute(self, token_ids: list[int], path: list[int], count: int) -> tuple[list[int], Tensor]:
        """`count` tokens, the first of them those of `path`, and the logits of the last."""
        decoder = self._target.get_decoder()
        found = decoder(input_ids=torch.tensor([token_ids[:-1]]), output_hidden_states=True).hidden_states
        states = torch.cat([found[layer] for layer in self._layer_ids], dim=-1) @ self._fc.T
        tokens = torch.tensor([token_ids[1:]])
        logits = torch.empty(0)
        for place in range(count):
            last = self._pass(decoder.embed_tokens(tokens), states)[:, -1:]
            logits = (self._norm(last) @ self._head.T)[0, 0]
            draft = int(logits.argmax())
            token = path[place] if place < len(path) else draft + int(self._d2t[draft])
            tokens = torch.cat((tokens, torch.tensor([[token]])), dim=1)
            states = torch.cat((states, last), dim=1)
        return tokens[0, len(token_ids) - 1 :].tolist(), logits

    def _pass(self, embedded: Tensor, states: Tensor) -> Tensor:
        normed, length = self._hidden_norm(states), states.shape[1]
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        angles = self._rotary(states, torch.arange(length)[None])
        x = torch.cat((self._layer.input_layernorm(embedded), normed), dim=-1)
        attended, _ = self._layer.self_attn(x, position_embeddings=angles, attention_mask=mask)
        residual = (normed if self._norm_before_residual else states) + attended
        found: Tensor = residual + self._layer.mlp(self._layer.post_attention_layernorm(residual))
        return found
