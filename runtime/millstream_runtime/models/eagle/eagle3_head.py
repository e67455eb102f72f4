"""An EAGLE-3 head (Li et al. 2025, arXiv 2503.01840): a token and hidden states of three layers before it, to a draft.

    states(j - 1), three layers' ─ fc ─► h ─ norm ─┐
    embedding of token t(j) ───────────── norm ────┴─ attention, + h ─ MLP ─► h(j) ─ norm, lm_head ─► t(j + 1)

The head's own h(j) stands in for the fused states where the target has none yet. Its output head has fewer tokens than
the target's vocabulary; `d2t` says by how much each has a larger id there. The embedding is the target's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millstream_runtime.draft_head_tensors import EAGLE3_STATES
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.models.config.model_config import ModelConfig
from millstream_runtime.models.eagle.eagle3_folder import Eagle3Shape
from millstream_runtime.models.layers.attention import Attention, grouped_query_attention
from millstream_runtime.models.layers.decoder import Decoder, RotarySteps
from millstream_runtime.models.layers.mlp import gated_mlp
from millstream_runtime.models.layers.torch_layers import layers_of
from millstream_runtime.models.loading.layer_kernels import TensorLayer
from millstream_runtime.models.loading.weights import Weights

TOKEN_TABLE_DTYPES = ("I64", "I32")


class Eagle3Head:
    """A loaded head.

    Attributes: `config`, of its layer; `token_ids`, the target's id of each token that it proposes, None: the same;
    `weight_bytes`, second copies included.
    """

    def __init__(self, shape: Eagle3Shape, weights: Weights) -> None:
        self.config = config = shape.config
        hidden, layer = config.hidden_size, "model.layers.0"
        self._norm_before_residual = shape.norm_before_residual
        self._fusion = weights.linear({"fc": hidden}, EAGLE3_STATES * hidden)
        self._embedding_norm, self._hidden_norm, self._post_attention_norm, self._norm = (
            _norm(config, weights, name)
            for name in (
                f"{layer}.input_layernorm",
                f"{layer}.hidden_norm",
                f"{layer}.post_attention_layernorm",
                "norm",
            )
        )
        self._attention = grouped_query_attention(
            config, weights, 0, output_bias=shape.output_bias, in_features=2 * hidden
        )
        self._mlp = gated_mlp(config, weights, f"{layer}.mlp", config.intermediate_size)
        self._head = weights.linear({"lm_head": shape.draft_vocab_size}, hidden)
        self._rotary_steps = RotarySteps(config, weights)
        self.token_ids = _token_ids(shape, weights) if shape.has_token_table else None
        self.weight_bytes = weights.num_bytes

    def read_states(self, target: Decoder, kept: Tensor) -> Tensor:
        """`kept` `[T, 3 * hidden]`, of the target, to `[T, hidden]`: what `forward` takes."""
        return self._fusion(kept)

    def forward(self, embedded: Tensor, states: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Return the states of the tokens, `[T, hidden]`.

        Args:
            embedded: the target's embeddings of the tokens, `[T, hidden]`.
            states: of the tokens before them, `[T, hidden]`: from `read_states`, or those that this has returned.
            positions: `[T]` int64: of the tokens before them.
        """
        normed = self._hidden_norm(states)
        attended = self._attention(
            torch.cat((self._embedding_norm(embedded), normed), dim=-1), self._rotary_steps(positions, attention)
        )
        residual = normed if self._norm_before_residual else states.clone()
        self._attention.output.add_to(residual, attended)
        self._mlp.add_to(residual, self._post_attention_norm(residual))
        return residual

    def logits(self, target: Decoder, states: Tensor) -> Tensor:
        """`[rows, hidden]` of `forward` to `[rows, draft vocabulary]`."""
        return self._head(self._norm(states))


def _norm(config: ModelConfig, weights: Weights, name: str) -> TensorLayer:
    weight = weights.tensor(f"{name}.weight", config.hidden_size)
    return layers_of(weights).rms_norm(weight, config.rms_norm_eps)


def _token_ids(shape: Eagle3Shape, weights: Weights) -> list[int]:
    """Of the target, by `d2t`, which has the differences. Raises RuntimeFailure: CheckpointInvalid."""
    table = weights.read("d2t", (shape.draft_vocab_size,), TOKEN_TABLE_DTYPES)
    if table.device.type == "meta":
        return []
    ids: list[int] = (table.to(torch.int64) + torch.arange(shape.draft_vocab_size)).tolist()
    wrong = next((draft for draft, token in enumerate(ids) if not 0 <= token < shape.config.vocab_size), None)
    if wrong is not None:
        raise RuntimeFailure(
            FailureReason.CHECKPOINT_INVALID,
            f"Tensor d2t maps draft token {wrong} to {ids[wrong]}; vocab_size is {shape.config.vocab_size}. The "
            "checkpoint is damaged.",
        )
    return ids
