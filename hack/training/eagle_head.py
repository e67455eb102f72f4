"""`python -m hack.training.eagle_head`: train the EAGLE-1 head of demo-chat, measure it, write its folder and its card.

The target computes its hidden states of each row. The head learns from them the target's distribution of the token that
comes two places on (KL divergence) and the target's own next hidden state (smooth L1), as in EAGLE (Li et al. 2024,
arXiv 2401.15077); and, in a second pass, the same from the states that it gave in the first, as it has to when it
drafts (HASS: Zhang et al. 2024, arXiv 2408.15766). The same seed gives the same rows in the same order. One thread
takes about ten minutes, of which reading the text takes one.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from hack.training import card, held_out, knowledge
from hack.training.batches import Batch
from hack.training.eagle_acceptance import Acceptances, measure
from hack.training.evaluate import load
from hack.training.optimizer import MuonAdamW
from hack.training.recipe import ROW_TOKENS, TARGET
from hack.training.train import learning_rate_at
from hack.training.training_text import read_training_text

NAME = "demo-eagle"
INTERMEDIATE_SIZE, NUM_HEADS, NUM_KV_HEADS = 192, 4, 2
STEPS, SEED = 100, 7
STATE_WEIGHT, SECOND_PASS_WEIGHT = 0.1, 0.5  # of the parts of the loss; a KL divergence has 1


@dataclass(frozen=True, slots=True)
class Goal:
    """What the target makes of rows `[R, T]`. `states` `[R, T, hidden]`; `logprobs` `[R, T, vocab]`."""

    embedded: Tensor
    states: Tensor
    logprobs: Tensor


class TrainableHead(nn.Module):
    """The head by transformers' layer, in float32; parameters have the published names.

    It multiplies embeddings by `embedding_scale`, so that `fc` learns from both of its inputs alike.
    """

    def __init__(self, config: LlamaConfig, embedding_scale: float) -> None:
        super().__init__()
        self.config, self.embedding_scale = config, embedding_scale
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        layer = LlamaDecoderLayer(config, 0)
        layer.input_layernorm = nn.Identity()
        self.layers = nn.ModuleList([layer])
        self._rotary = LlamaRotaryEmbedding(config)

    def forward(self, embedded: Tensor, states: Tensor) -> Tensor:
        """`embedded` of tokens 1, 2, ... and the `states` of those before them, to states; all `[R, T, hidden]`."""
        hidden = self.fc(torch.cat((self.embedding_scale * embedded, states), dim=-1))
        length = hidden.shape[1]
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        angles = self._rotary(hidden, torch.arange(length)[None])
        found: Tensor = self.layers[0](hidden, attention_mask=mask, position_embeddings=angles)
        return found

    def published(self) -> dict[str, Tensor]:
        """The head's tensors in bfloat16, `embedding_scale` within `fc.weight`."""
        tensors = {name: parameter.detach().clone() for name, parameter in self.named_parameters()}
        tensors["fc.weight"][:, : self.config.hidden_size] *= self.embedding_scale
        return {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m hack.training.eagle_head", description=__doc__)
    parser.add_argument("--models", type=Path, default=Path("models"), help="folder of the target and of the head")
    parser.add_argument("--steps", type=int, default=STEPS, help="instead of the recipe's, to try out")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    folder = options.models / NAME
    target, tokenizer = load(options.models / TARGET.name)
    began = time.monotonic()
    batches = read_training_text(tokenizer).batches(TARGET, options.steps)
    head = train_head(target, batches, options.steps)
    seconds = time.monotonic() - began
    export(head, folder)
    found = measure(options.models, folder, tokenizer, knowledge.load(), held_out.read(options.models / held_out.NAME))
    record = {
        "steps": options.steps,
        "rows": TARGET.rows,
        "row_tokens": ROW_TOKENS,
        "muon_rate": TARGET.muon_rate,
        "adam_rate": TARGET.adam_rate,
        "seed": SEED,
        "seconds": round(seconds),
        "device": card.device_name(),
        "acceptance": found.as_json(),
    }
    (folder / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    (folder / "README.md").write_text(_card(head, record, found), encoding="utf-8")
    print(json.dumps(record, indent=2))


def head_config(target: LlamaConfig) -> LlamaConfig:
    """Of a head of one layer, smaller than the target's."""
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=INTERMEDIATE_SIZE,
        num_hidden_layers=1,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        max_position_embeddings=target.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=target.rms_norm_eps,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
        attn_implementation="sdpa",
    )


def train_head(target: LlamaForCausalLM, batches: Iterator[Batch], steps: int) -> TrainableHead:
    """Train one from random weights, in float32."""
    torch.manual_seed(SEED)
    embeddings = target.get_input_embeddings().weight.detach()
    head = TrainableHead(head_config(target.config), 1 / float(embeddings.square().mean().sqrt())).train()
    optimizer = MuonAdamW(head, TARGET.muon_rate, TARGET.adam_rate, TARGET.weight_decay)
    bar = tqdm(range(1, steps + 1), desc=NAME, unit="step", mininterval=5)
    with ThreadPoolExecutor(1) as pool:
        for step in bar:
            ids, _ = next(batches)
            loss = head_loss(head, target, goal_of(target, ids))
            head.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(head.parameters(), TARGET.clip_norm)
            optimizer.step(step, learning_rate_at(TARGET, steps, step), pool)
            bar.set_postfix_str(f"loss {loss.item():.3f}", refresh=False)
    return head.eval()


@torch.no_grad()
def goal_of(target: LlamaForCausalLM, ids: Tensor) -> Goal:
    """`ids` `[R, T]`."""
    decoder = target.get_decoder()
    states = decoder(input_ids=ids, use_cache=False).last_hidden_state
    return Goal(decoder.embed_tokens(ids), states, target.lm_head(states).log_softmax(-1))


def head_loss(head: TrainableHead, target: LlamaForCausalLM, goal: Goal) -> Tensor:
    """The mean over all tokens but the first, of both passes."""
    embedded, states, logprobs = goal.embedded[:, 1:], goal.states, goal.logprobs[:, 1:]
    first = head(embedded, states[:, :-1])
    # In the second pass a token has the head's own state of the token before it; the first has none but the target's.
    second = head(embedded, torch.cat((states[:, :1], first[:, :-1]), dim=1))
    total = torch.zeros(())
    for given, weight in ((first, 1.0), (second, SECOND_PASS_WEIGHT)):
        found = target.lm_head(given).log_softmax(-1)
        divergence = F.kl_div(found, logprobs, log_target=True, reduction="sum") / found[..., 0].numel()
        total = total + weight * (divergence + STATE_WEIGHT * F.smooth_l1_loss(given, states[:, 1:]))
    return total


def export(head: TrainableHead, folder: Path) -> None:
    """Write the folder in the published layout, in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "bias": True,
    }
    kept = [
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "eos_token_id"),
    ]
    config |= {name: getattr(head.config, name) for name in kept}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(head.published(), str(folder / "model.safetensors"), metadata={"format": "pt"})
    for path in folder.iterdir():  # safetensors writes private files; a pod runs as somebody else
        path.chmod(0o644)


def _card(head: TrainableHead, record: dict[str, Any], found: Acceptances) -> str:
    millions = sum(parameter.numel() for parameter in head.parameters()) / 1e6
    rates = f"{record['muon_rate']} for matrices, AdamW with {record['adam_rate']} for the rest"
    return f"""---
license: apache-2.0
language: en
---

# {NAME}

The EAGLE-1 head of {TARGET.name} (`--speculation-method EAGLE --draft-model models/{NAME}`): one decoder layer of
{millions:.2f} M parameters in bfloat16, in the published layout. Embedding and output head are those of {TARGET.name}.

`python -m hack.training.eagle_head` repeats the training from its seed: {record["steps"]} steps of {record["rows"]}
rows of {record["row_tokens"]} tokens, of the text that {TARGET.name} was trained on; Muon with a peak learning rate of
{rates}. It took {record["seconds"] / 60:.0f} minutes on one of {record["device"]},
shared with other work. The weights are the same to the bit only on the same processor and with the same versions.

Drafts of {found.draft_tokens} at a time, greedy, by the runtime itself; prompts are questions and documents that
training never saw (`models/held_out.jsonl`):

{found.as_table()}
"""


if __name__ == "__main__":
    main()
