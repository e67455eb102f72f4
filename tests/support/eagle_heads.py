"""Folders with small EAGLE-1 heads, and what such a head drafts, computed anew by transformers' layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.speculation.eagle import EagleDrafter

WriteHead = Callable[..., Path]
SPECULATORS_NAMES = {"fc.": "fusion_fc.", "layers.0.": "transformer."}


@pytest.fixture(scope="session")
def write_head(tmp_path_factory: pytest.TempPathFactory) -> WriteHead:
    """`write_head(target, **overrides)`: a folder with a seeded random head of the target, in the published layout."""
    made: dict[str, Path] = {}

    def write(target: Path, **overrides: Any) -> Path:
        key = repr((target, sorted(overrides.items())))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("head")
            save_head(made[key], head_config(target, **overrides), random_head(target, **overrides))
        return made[key]

    return write


def head_config(target: Path, **overrides: Any) -> dict[str, Any]:
    """config.json of a head of one small layer."""
    of_target = json.loads((target / "config.json").read_text())
    kept = ("hidden_size", "vocab_size", "max_position_embeddings", "rms_norm_eps")
    sizes = {"intermediate_size": 56, "num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 1}
    names = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "pad_token_id": 0}
    return {name: of_target[name] for name in kept} | sizes | names | overrides


def random_head(target: Path, seed: int = 3, **overrides: Any) -> dict[str, Tensor]:
    """Tensors by the published names, a bias of `fc` among them."""
    config = LlamaConfig(**head_config(target, **overrides))
    torch.manual_seed(seed)
    tensors = {"fc.weight": 0.15 * torch.randn(config.hidden_size, 2 * config.hidden_size)}
    tensors["fc.bias"] = 0.1 * torch.randn(config.hidden_size)
    for index in range(config.num_hidden_layers):
        for name, parameter in LlamaDecoderLayer(config, index).named_parameters():
            if index or not name.startswith("input_layernorm"):
                noise = torch.randn_like(parameter)
                tensors[f"layers.{index}.{name}"] = 1 + 0.1 * noise if "norm" in name else 0.15 * noise
    return tensors


def save_head(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, str(folder / "model.safetensors"))


def to_speculators(folder: Path, out: Path) -> Path:
    """The same head in the layout of `speculators`."""
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    outer = {
        "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
        "speculators_model_type": "eagle",
        "layernorms": False,
        "fusion_bias": "fc.bias" in tensors,
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "transformer_layer_config": {name: value for name, value in config.items() if name != "architectures"},
    }

    def renamed(name: str) -> str:
        for ours, theirs in SPECULATORS_NAMES.items():
            if name.startswith(ours):
                return theirs + name.removeprefix(ours)
        return name

    save_head(out, outer, {renamed(name): tensor for name, tensor in tensors.items()})
    return out


class EagleReference:
    """What a head of a Llama drafts behind known tokens, computed anew each time, in float32."""

    def __init__(self, target: Path, head: Path) -> None:
        config = LlamaConfig(**json.loads((head / "config.json").read_text()), attn_implementation="eager")
        tensors = load_file(head / "model.safetensors")
        self._target = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self._layers = [LlamaDecoderLayer(config, index).eval() for index in range(config.num_hidden_layers)]
        self._layers[0].input_layernorm = nn.Identity()
        for index, layer in enumerate(self._layers):
            own = f"layers.{index}."
            layer.load_state_dict({n.removeprefix(own): t for n, t in tensors.items() if n.startswith(own)})
        self._weight, self._bias = tensors["fc.weight"], tensors.get("fc.bias")
        self._rotary = LlamaRotaryEmbedding(config)
        self._known: dict[tuple[int, ...], list[int]] = {}

    def drafts(self, token_ids: list[int], count: int) -> list[int]:
        """The `count` tokens that follow."""
        found = self._known.get(tuple(token_ids), [])
        if len(found) < count:
            found = self._known[tuple(token_ids)] = self._compute(token_ids, [], count)[0]
        return found[:count]

    def ranked(self, token_ids: list[int], path: list[int], count: int) -> list[int]:
        """The `count` most probable tokens behind the known ones and the drafts of a path, the first before the
        second."""
        return self._compute(token_ids, path, len(path) + 1)[1].topk(count).indices.tolist()

    @torch.no_grad()
    def _compute(self, token_ids: list[int], path: list[int], count: int) -> tuple[list[int], Tensor]:
        """`count` tokens, the first of them those of `path`, and the logits of the last."""
        decoder = self._target.get_decoder()
        states = decoder(input_ids=torch.tensor([token_ids[:-1]])).last_hidden_state  # behind the final norm
        tokens = torch.tensor([token_ids[1:]])
        logits = torch.empty(0)
        for place in range(count):
            hidden = nn.functional.linear(
                torch.cat((decoder.embed_tokens(tokens), states), dim=-1), self._weight, self._bias
            )
            length = hidden.shape[1]
            mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
            angles = self._rotary(hidden, torch.arange(length)[None])
            for layer in self._layers:
                hidden = layer(hidden, attention_mask=mask, position_embeddings=angles)
            last = hidden[:, -1:]
            logits = self._target.lm_head(last)[0, 0]
            token = path[place] if place < len(path) else int(logits.argmax())
            tokens = torch.cat((tokens, torch.tensor([[token]])), dim=1)
            states = torch.cat((states, last), dim=1)
        return tokens[0, len(token_ids) - 1 :].tolist(), logits


def eagle_drafter_of(engine: Engine) -> EagleDrafter:
    """The engine's own."""
    assert engine._drafting is not None
    drafter = engine._drafting._drafter
    assert isinstance(drafter, EagleDrafter)
    return drafter


def watch_drafts(engine: Engine, reference: EagleReference) -> list[str]:
    """Compare all that the engine's head proposes from now on with `reference`; what differs is added to the list."""
    drafter, wrong = eagle_drafter_of(engine), list[str]()
    propose = drafter.propose

    def compared(wanted: Any) -> Any:
        answer = propose(wanted)
        for sequence, drafts in answer.items():
            if isinstance(drafts, list):
                expected = reference.drafts(sequence.token_ids, len(drafts))
                if drafts != expected:
                    wrong.append(f"{sequence.request.request_id}: {drafts}, not {expected}")
        return answer

    drafter.propose = compared  # type: ignore[method-assign]
    return wrong
