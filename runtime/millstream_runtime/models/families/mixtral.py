"""Mixtral (Jiang et al. 2024, arXiv 2401.04088): Mistral with eight experts, of which each token uses two."""

from __future__ import annotations

from dataclasses import dataclass

from millstream_runtime.models.config.fields import Fields
from millstream_runtime.models.config.model_config import ModelConfig, common_fields
from millstream_runtime.models.layers.attention import grouped_query_attention
from millstream_runtime.models.layers.decoder import Decoder
from millstream_runtime.models.layers.moe import SoftmaxRouter, SparseMlp, read_experts, sparse_mlp
from millstream_runtime.models.layers.pre_norm_decoder import pre_norm_decoder
from millstream_runtime.models.loading.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtralConfig(ModelConfig):
    """`intermediate_size` is that of one expert."""

    num_experts: int
    num_experts_per_token: int

    @property
    def has_experts(self) -> bool:
        return True


def read_config(fields: Fields) -> MixtralConfig:
    common = common_fields(fields)
    num_experts, top_k = read_experts(fields, "num_local_experts")
    return MixtralConfig(
        **common | {"attention_bias": False, "mlp_bias": False},
        num_experts=num_experts,
        num_experts_per_token=top_k,
    )


def build(config: MixtralConfig, weights: Weights) -> Decoder:
    return pre_norm_decoder(
        config,
        weights,
        lambda layer: grouped_query_attention(config, weights, layer),
        lambda layer: _experts(config, weights, layer),
    )


def _experts(config: MixtralConfig, weights: Weights, layer: int) -> SparseMlp:
    prefix = f"model.layers.{layer}.block_sparse_moe"
    gate = weights.tensor(f"{prefix}.gate.weight", config.num_experts, config.hidden_size)
    return sparse_mlp(
        weights,
        SoftmaxRouter(gate, config.num_experts_per_token, normalise=True),
        [f"{prefix}.experts.{expert}" for expert in range(config.num_experts)],
        config.hidden_size,
        config.intermediate_size,
        size_field="intermediate_size",
        names=("w1", "w3", "w2"),
    )
