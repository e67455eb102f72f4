"""Qwen3 with a mixture of experts in most layers (Yang et al. 2025, arXiv 2505.09388)."""

from __future__ import annotations

from dataclasses import dataclass

from millstream_runtime.models.config.fields import Fields
from millstream_runtime.models.config.model_config import ModelConfig, common_fields
from millstream_runtime.models.families.qwen3 import attention
from millstream_runtime.models.layers.decoder import Decoder
from millstream_runtime.models.layers.mlp import Mlp, gated_mlp
from millstream_runtime.models.layers.moe import SoftmaxRouter, read_experts, sparse_mlp
from millstream_runtime.models.layers.pre_norm_decoder import pre_norm_decoder
from millstream_runtime.models.loading.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeConfig(ModelConfig):
    """`intermediate_size` is that of the dense layers."""

    num_experts: int
    num_experts_per_token: int
    expert_intermediate_size: int
    normalise_shares: bool
    dense_layers: frozenset[int]

    @property
    def has_experts(self) -> bool:
        return True


def read_config(fields: Fields) -> Qwen3MoeConfig:
    common = common_fields(fields) | {"mlp_bias": False}
    num_experts, top_k = read_experts(fields, "num_experts")
    return Qwen3MoeConfig(
        **common,
        num_experts=num_experts,
        num_experts_per_token=top_k,
        expert_intermediate_size=fields.integer("moe_intermediate_size"),
        normalise_shares=fields.flag("norm_topk_prob"),
        dense_layers=_dense_layers(fields, common["num_layers"]),
    )


def build(config: Qwen3MoeConfig, weights: Weights) -> Decoder:
    return pre_norm_decoder(
        config,
        weights,
        lambda layer: attention(config, weights, layer),
        lambda layer: _mlp(config, weights, layer),
    )


def _mlp(config: Qwen3MoeConfig, weights: Weights, layer: int) -> Mlp:
    prefix = f"model.layers.{layer}.mlp"
    if layer in config.dense_layers:
        return gated_mlp(config, weights, prefix, config.intermediate_size)
    gate = weights.tensor(f"{prefix}.gate.weight", config.num_experts, config.hidden_size)
    return sparse_mlp(
        weights,
        SoftmaxRouter(gate, config.num_experts_per_token, config.normalise_shares),
        [f"{prefix}.experts.{expert}" for expert in range(config.num_experts)],
        config.hidden_size,
        config.expert_intermediate_size,
        size_field="moe_intermediate_size",
    )


def _dense_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    """Those named by `mlp_only_layers`, and those that `decoder_sparse_step` leaves out."""
    named = fields.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(isinstance(one, int) for one in named):
        raise fields.invalid("mlp_only_layers", f"{named!r:.80}; it must be a list of layer numbers")
    step = fields.integer("decoder_sparse_step", 1)
    return frozenset(named) | {layer for layer in range(num_layers) if (layer + 1) % step}
