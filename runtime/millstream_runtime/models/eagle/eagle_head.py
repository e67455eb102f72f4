"""An EAGLE-1 head (Li et al. 2024, arXiv 2401.15077): a token and the hidden state before it, to the next hidden state.

    embedding of token t(j) ──┐
                              ├─ fc ─ decoder layer ─► state(j) ─ the target's output head ─► token t(j+1)
    state(j - 1) of the target ┘

States are the target's behind its final norm, and so are those that the head gives: there is no norm between it and the
output head, nor before its first layer. Embedding and output head are the target's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millstream_runtime.models.config.model_config import ModelConfig
from millstream_runtime.models.eagle.eagle_folder import EagleShape
from millstream_runtime.models.layers.attention import Attention, grouped_query_attention
from millstream_runtime.models.layers.decoder import Decoder, PreNormLayer, RotarySteps, pre_norm_layer
from millstream_runtime.models.layers.mlp import gated_mlp
from millstream_runtime.models.layers.torch_layers import layers_of
from millstream_runtime.models.loading.layer_kernels import TensorLayer
from millstream_runtime.models.loading.weights import Weights


class EagleHead:
    """A loaded head.

    Attributes: `config`, of its layers; `weight_bytes`, second copies included; `token_ids`: see `heads.DraftHead`.
    """

    token_ids: list[int] | None = None

    def __init__(self, shape: EagleShape, weights: Weights) -> None:
        self.config = config = shape.config
        self._fusion = weights.linear({"fc": config.hidden_size}, 2 * config.hidden_size, shape.fusion_bias)
        self._layers = [_layer(shape, weights, layer) for layer in range(config.num_layers)]
        self._rotary_steps = RotarySteps(config, weights)
        self.weight_bytes = weights.num_bytes

    def read_states(self, target: Decoder, kept: Tensor) -> Tensor:
        """`kept` `[T, hidden]`, behind the target's last layer, to the same behind its final norm."""
        return target.normed(kept)

    def forward(self, embedded: Tensor, states: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Return the states of the tokens, `[T, hidden]`, as if behind the target's final norm.

        Args:
            embedded: the target's embeddings of the tokens, `[T, hidden]`.
            states: of the tokens before them, `[T, hidden]`: the target's, or those that this has returned.
            positions: `[T]` int64: of the tokens before them.
        """
        residual = self._fusion(torch.cat((embedded, states), dim=-1))
        step = self._rotary_steps(positions, attention)
        for layer in self._layers:
            layer(residual, step)
        return residual

    def logits(self, target: Decoder, states: Tensor) -> Tensor:
        """`[rows, hidden]` of `forward` to `[rows, vocab]`."""
        return target.logits_of_normed(states)


def _layer(shape: EagleShape, weights: Weights, layer: int) -> PreNormLayer:
    config, name = shape.config, f"model.layers.{layer}"
    attention = grouped_query_attention(config, weights, layer, output_bias=shape.output_bias)
    mlp = gated_mlp(config, weights, f"{name}.mlp", config.intermediate_size)
    if layer:
        return pre_norm_layer(config, weights, layer, attention, mlp)
    return PreNormLayer(_unchanged, attention, _post_attention_norm(config, weights, name), mlp)


def _post_attention_norm(config: ModelConfig, weights: Weights, name: str) -> TensorLayer:
    weight = weights.tensor(f"{name}.post_attention_layernorm.weight", config.hidden_size)
    return layers_of(weights).rms_norm(weight, config.rms_norm_eps)


def _unchanged(x: Tensor) -> Tensor:
    return x
