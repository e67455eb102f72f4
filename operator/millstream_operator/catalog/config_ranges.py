"""The range of every number that the catalogue reads from a config.json: field, lowest, highest.

A config.json is written by anyone. Outside these ranges a number is a mistake or an attack, and sizes that are computed
from it mean nothing. The highest values lie far above every published model, and low enough that the bytes of any
combination stay below 2^63: the API server refuses a status with a larger integer.
"""

from __future__ import annotations

from dataclasses import dataclass

from millstream_runtime.quantization_config.settings import GROUP_SIZE_LIMIT


@dataclass(frozen=True, slots=True)
class NumberRange:
    """Both ends are allowed."""

    lowest: int
    highest: int

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and self.lowest <= value <= self.highest

    def __str__(self) -> str:
        return f"a whole number from {self.lowest} to {self.highest}"


_HIDDEN, _WIDTH, _HEADS, _LAYERS, _EXPERTS = 1 << 17, 1 << 20, 1 << 12, 1 << 10, 1 << 12

RANGES = {
    # The decoder.
    "hidden_size": NumberRange(1, _HIDDEN),
    "num_hidden_layers": NumberRange(1, _LAYERS),
    "vocab_size": NumberRange(1, 1 << 24),
    "max_position_embeddings": NumberRange(1, 1 << 28),
    # Attention.
    "num_attention_heads": NumberRange(1, _HEADS),
    "num_key_value_heads": NumberRange(1, _HEADS),
    "num_kv_heads": NumberRange(1, _HEADS),
    "head_dim": NumberRange(1, 1 << 13),
    "kv_lora_rank": NumberRange(1, _HIDDEN),
    "q_lora_rank": NumberRange(1, _HIDDEN),
    "qk_nope_head_dim": NumberRange(1, 1 << 13),
    "qk_rope_head_dim": NumberRange(1, 1 << 13),
    "v_head_dim": NumberRange(1, 1 << 13),
    # MLPs and experts.
    "intermediate_size": NumberRange(1, _WIDTH),
    "ffn_hidden_size": NumberRange(1, _WIDTH),
    "moe_intermediate_size": NumberRange(1, _WIDTH),
    "shared_expert_intermediate_size": NumberRange(0, _WIDTH),
    "num_local_experts": NumberRange(1, _EXPERTS),
    "num_experts": NumberRange(1, _EXPERTS),
    "n_routed_experts": NumberRange(0, _EXPERTS),
    "n_shared_experts": NumberRange(0, 64),
    "num_experts_per_tok": NumberRange(0, _EXPERTS),
    "n_group": NumberRange(1, _EXPERTS),
    "topk_group": NumberRange(1, _EXPERTS),
    "first_k_dense_replace": NumberRange(0, _LAYERS),
    "decoder_sparse_step": NumberRange(1, _LAYERS),
    "mlp_only_layers": NumberRange(0, _LAYERS),
    "num_nextn_predict_layers": NumberRange(0, 16),
    "num_ln_in_parallel_attn": NumberRange(1, 2),
    # Draft heads.
    "draft_vocab_size": NumberRange(1, 1 << 24),
    "target_hidden_size": NumberRange(1, _HIDDEN),
    "eagle_aux_hidden_state_layer_ids": NumberRange(0, _LAYERS),
    "medusa_num_heads": NumberRange(1, 16),
    "medusa_num_layers": NumberRange(1, 8),
    # quantization_config.
    "bits": NumberRange(2, 8),
    "w_bit": NumberRange(2, 8),
    "num_bits": NumberRange(2, 16),
    "group_size": NumberRange(-1, GROUP_SIZE_LIMIT),
    "q_group_size": NumberRange(-1, GROUP_SIZE_LIMIT),
    "weight_block_size": NumberRange(1, GROUP_SIZE_LIMIT),
    "block_structure": NumberRange(1, GROUP_SIZE_LIMIT),
}
