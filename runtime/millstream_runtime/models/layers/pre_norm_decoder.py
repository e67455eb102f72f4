"""Decoders of pre-norm layers, as Llama has them: families differ in the blocks of a layer."""

from __future__ import annotations

from collections.abc import Callable

from millstream_runtime.models.config.model_config import ModelConfig
from millstream_runtime.models.layers.attention import AttentionBlock
from millstream_runtime.models.layers.decoder import Decoder, pre_norm_layer
from millstream_runtime.models.layers.mlp import Mlp, gated_mlp
from millstream_runtime.models.loading.weights import Weights

AttentionOf = Callable[[int], AttentionBlock]  # of a layer, by its number
MlpOf = Callable[[int], Mlp]


def pre_norm_decoder(config: ModelConfig, weights: Weights, attention_of: AttentionOf, mlp_of: MlpOf) -> Decoder:
    """Build a decoder from the blocks of each layer."""
    layers = [
        pre_norm_layer(config, weights, layer, attention_of(layer), mlp_of(layer)) for layer in range(config.num_layers)
    ]
    return Decoder(config, weights, layers)


def dense_decoder(
    config: ModelConfig, weights: Weights, attention_of: AttentionOf, *, fused_mlp: bool = False
) -> Decoder:
    """Build a decoder with a gated MLP in each layer. `fused_mlp`: the checkpoint has gate and up as one tensor."""

    def mlp_of(layer: int) -> Mlp:
        return gated_mlp(config, weights, f"model.layers.{layer}.mlp", config.intermediate_size, fused=fused_mlp)

    return pre_norm_decoder(config, weights, attention_of, mlp_of)
