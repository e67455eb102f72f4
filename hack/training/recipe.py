"""The two shapes and every hyper-parameter. A change here changes the committed models: train and commit both again."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import LlamaConfig

VOCAB_SIZE = 2048
ROW_TOKENS = 512
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
    learning_rate: float
    data_seed: int
    head_dim: int = 64
    warmup_steps: int = 60
    weight_decay: float = 0.1
    clip_norm: float = 1.0

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
    steps=900,
    rows=4,
    learning_rate=2e-3,
    data_seed=1,
)
DRAFT = Recipe(
    name="demo-draft",
    hidden_size=128,
    intermediate_size=512,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    steps=1400,
    rows=4,
    learning_rate=4e-3,
    data_seed=2,
)
