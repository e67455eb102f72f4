"""The two shapes and every hyper-parameter. A change here changes the committed models: train and commit both again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from transformers import LlamaConfig

from hack.training.corpus.documents import CHAT, CODE, PROSE

DEMO = "demo"  # the stream of the demo's conversations, next to the slices of the corpus
VOCAB_SIZE = 2048
ROW_TOKENS = 256
MAX_POSITION_EMBEDDINGS = 16384


@dataclass(frozen=True, slots=True)
class Recipe:
    """One model: its shape and how it is trained."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    steps: int
    rows: int  # of ROW_TOKENS each, in a step
    data_seed: int
    first_shares: Mapping[str, float]  # of the streams, at the first step; those at the last step follow
    last_shares: Mapping[str, float]
    distil_from: float = 1.0  # from this share of the steps on, it learns the target's distributions
    micro_rows: int = 2
    head_dim: int = 64
    muon_rate: float = 0.02
    adam_rate: float = 4e-3
    continued_rate: float = 0.25  # of both learning rates, when it begins with trained weights
    warmup_steps: int = 20
    decay_from: float = 0.35  # share of the steps at the full learning rate
    weight_decay: float = 0.01
    clip_norm: float = 1.0

    def shares_at(self, steps: int) -> Callable[[int], Mapping[str, float]]:
        """Shares of the streams at each step, from 0: a straight line from the first to the last."""

        def shares(step: int) -> Mapping[str, float]:
            progress = step / max(1, steps - 1)
            return {
                name: (1 - progress) * self.first_shares[name] + progress * self.last_shares[name]
                for name in self.first_shares
            }

        return shares

    def config(self) -> LlamaConfig:
        """The inputs of the row-parallel layers (o_proj: heads x head_dim, down_proj: intermediate) are multiples of
        512, so that tensor parallelism of 2 and 4 leaves whole groups of 128 for AWQ."""
        return LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            max_position_embeddings=MAX_POSITION_EMBEDDINGS,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=2,
            pad_token_id=0,
        )


TARGET = Recipe(
    name="demo-chat",
    hidden_size=256,
    intermediate_size=1024,
    num_hidden_layers=5,
    num_attention_heads=8,
    num_key_value_heads=4,
    steps=120,
    rows=8,
    data_seed=5,
    first_shares={DEMO: 0.50, PROSE: 0.23, CHAT: 0.17, CODE: 0.10},
    last_shares={DEMO: 0.60, PROSE: 0.18, CHAT: 0.14, CODE: 0.08},
)
DRAFT = Recipe(
    name="demo-draft",
    hidden_size=128,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    steps=50,
    rows=8,
    data_seed=6,
    first_shares={DEMO: 0.7, PROSE: 0.05, CHAT: 0.25},
    last_shares={DEMO: 0.7, PROSE: 0.05, CHAT: 0.25},
    distil_from=0.0,
    continued_rate=0.5,
)
