"""The decoder that every family is: embedding, layers on a residual stream, final norm, output head.

One step computes T tokens of any mix of requests, one after another; only attention knows who owns which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from millstream_runtime.models.config.model_config import ModelConfig
from millstream_runtime.models.config.rope_config import RopeConfig
from millstream_runtime.models.layers.attention import Attention, AttentionBlock, ReadRows, Step
from millstream_runtime.models.layers.mlp import Mlp
from millstream_runtime.models.layers.rope import rotary_table
from millstream_runtime.models.layers.torch_layers import layers_of
from millstream_runtime.models.linear.linear import DenseLinear, Linear
from millstream_runtime.models.linear.shares import Cut, vocabulary_share
from millstream_runtime.models.linear.tables import DenseTable, Table
from millstream_runtime.models.linear.tensor_parallel import (
    Embedding,
    Head,
    VocabularyParallelEmbedding,
    VocabularyParallelHead,
)
from millstream_runtime.models.loading.layer_kernels import TensorLayer
from millstream_runtime.models.loading.weights import Weights

# A tied output head shares the embedding. Where weights lie as [in, out] it is copied while that costs less than this.
TIED_HEAD_COPY_LIMIT_BYTES = 128 << 20


class Layer(Protocol):
    """One decoder layer: `finish(residual, attend(residual, step))`."""

    def __call__(self, residual: Tensor, step: Step) -> None:
        """Change the residual stream `[T, hidden]` in place."""

    def attend(self, residual: Tensor, step: Step) -> Tensor:
        """Store keys and values of all rows; return the attended heads `[T, heads * value size]`, of `step.rows` alone
        where it names some. The residual stream stays as it is."""

    def finish(self, residual: Tensor, attended: Tensor) -> None:
        """Add the layer's outputs to the residual stream of the attended rows, in place."""


@dataclass(frozen=True, slots=True)
class PreNormLayer:
    """`x += attention(norm(x)); x += mlp(norm(x))`, as in Llama and most since. Outputs add into the residual stream
    (`addmm_`) instead of a tensor of their own."""

    input_norm: TensorLayer
    attention: AttentionBlock
    post_attention_norm: TensorLayer
    mlp: Mlp

    def __call__(self, residual: Tensor, step: Step) -> None:
        self.finish(residual, self.attend(residual, step))

    def attend(self, residual: Tensor, step: Step) -> Tensor:
        return self.attention(self.input_norm(residual), step)

    def finish(self, residual: Tensor, attended: Tensor) -> None:
        self.attention.output.add_to(residual, attended)
        self.mlp.add_to(residual, self.post_attention_norm(residual))


class Decoder:
    """A loaded model. `forward` gives hidden states; `logits` only for the rows that a token is sampled from.

    Attributes:
        waits_for_device: whether a pass reads numbers back from the device to go on: then no CUDA graph can hold it.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, layers: Sequence[Layer], *, more_ropes: Sequence[RopeConfig] = ()
    ) -> None:
        """`more_ropes`: rotary tables beyond the config's, in the order of `Step.rotations` (1, 2, ...)."""
        self.config = config
        self.dtype = weights.dtype
        self.layers = list(layers)
        self._embedding = _load_embedding(config, weights)
        self._norm = layers_of(weights).rms_norm(self._load_norm(weights), config.rms_norm_eps)
        self._head = _load_head(config, weights, self._embedding.table)
        self._rotary_steps = RotarySteps(config, weights, more_ropes)
        self.weight_bytes = weights.num_bytes
        self.implementations = weights.implementations  # of quantized layers: number by arithmetic and reason
        self.waits_for_device = weights.waits_for_device

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: Attention,
        num_layers: int | None = None,
        watch: Callable[[int, Tensor], None] | None = None,
        read: ReadRows | None = None,
    ) -> Tensor:
        """`token_ids`, `positions`: `[T]` int64; positions are shifted by `ModelConfig.rotary_offset`. `num_layers`:
        only the first layers are computed, to measure them. `watch` is given the number of each layer and the residual
        stream before it, which it must copy, and at last the number of layers and what is returned. `read`: the rows
        that the last of all layers computes; None: all.

        Returns the last layer's residual stream `[T, hidden]`, or `[R, hidden]` of the rows read, not normed.
        """
        residual, step = self.embed(token_ids), self.step(positions, attention)
        for number, layer in enumerate(self.layers[:num_layers]):
            if watch is not None:
                watch(number, residual)
            if read is not None and number == len(self.layers) - 1:
                residual = _compute_rows(layer, residual, step, read)
            else:
                layer(residual, step)
        if watch is not None:
            watch(len(self.layers), residual)
        return residual

    def step(self, positions: Tensor, attention: Attention) -> Step:
        """What the layers of one forward pass share; see `forward`."""
        return self._rotary_steps(positions, attention)

    def logits(self, residual: Tensor) -> Tensor:
        """`[rows, hidden]` from `forward` to `[rows, vocab]`, in the model's dtype; on ranks beyond 0 no rows."""
        return self.logits_of_normed(self.normed(residual))

    def normed(self, residual: Tensor) -> Tensor:
        """`[rows, hidden]` from `forward` behind the final norm: what the output head reads."""
        return self._norm(residual)

    def logits_of_normed(self, x: Tensor) -> Tensor:
        """`[rows, hidden]` as behind the final norm to `[rows, vocab]`, without a family's cap."""
        return self._head(x)

    def embed(self, token_ids: Tensor) -> Tensor:
        """`[T]` int64 to the residual stream before the first layer, `[T, hidden]`."""
        return self._embedding(token_ids)

    def _load_norm(self, weights: Weights) -> Tensor:
        return weights.tensor("model.norm.weight", self.config.hidden_size)


def _compute_rows(layer: Layer, residual: Tensor, step: Step, read: ReadRows) -> Tensor:
    """Keys and values of all rows, and the residual stream `[R, hidden]` of those read alone."""
    attended = layer.attend(residual, replace(step, attention=read.attention, rows=read.rows))
    rows = residual.index_select(0, read.rows)
    if len(rows):
        layer.finish(rows, attended)
    return rows


class RotarySteps:
    """Makes what the layers of a forward pass share, from tables of angles for all positions."""

    def __init__(self, config: ModelConfig, weights: Weights, more_ropes: Sequence[RopeConfig] = ()) -> None:
        """`more_ropes`: as in `Decoder`."""
        # With a kernel that rotates: cosines and sines of each pair, in float32.
        self._rotates = layers_of(weights).rotates
        self._tables = (
            []
            if weights.device.type == "meta"
            else [_table(rope, config, weights) for rope in (config.rope, *more_ropes)]
        )

    def __call__(self, positions: Tensor, attention: Attention) -> Step:
        """`positions`: `[T]` int64, rows of the tables."""
        if self._rotates:
            return Step([], attention, positions, self._tables)
        rotations = [
            (cos.index_select(0, positions).unsqueeze(1), sin.index_select(0, positions).unsqueeze(1))
            for cos, sin in self._tables
        ]
        return Step(rotations, attention, positions)


def pre_norm_layer(
    config: ModelConfig, weights: Weights, layer: int, attention: AttentionBlock, mlp: Mlp
) -> PreNormLayer:
    """A layer around blocks that are already loaded, with its norms from `model.layers.N`."""
    prefix = f"model.layers.{layer}"
    input_norm, post_attention_norm = (
        layers_of(weights).rms_norm(
            weights.tensor(f"{prefix}.{name}_layernorm.weight", config.hidden_size), config.rms_norm_eps
        )
        for name in ("input", "post_attention")
    )
    return PreNormLayer(input_norm, attention, post_attention_norm, mlp)


def _table(rope: RopeConfig, config: ModelConfig, weights: Weights) -> tuple[Tensor, Tensor]:
    head_dim = config.rotary_head_dim
    cos, sin = rotary_table(rope, head_dim, config.max_model_len, weights.device)
    if layers_of(weights).rotates:
        half = cos.shape[1] // 2
        return cos[:, half:].contiguous(), sin[:, half:].contiguous()
    return cos.to(weights.dtype), sin.to(weights.dtype)


def _load_embedding(config: ModelConfig, weights: Weights) -> Embedding | VocabularyParallelEmbedding:
    share = vocabulary_share(config.vocab_size, weights.ranks)
    table = weights.table(
        "model.embed_tokens.weight",
        Cut(config.vocab_size, (share,)),
        config.hidden_size,
        is_head=config.tie_word_embeddings,
    )
    if weights.ranks.size == 1:
        return Embedding(table)
    return VocabularyParallelEmbedding(table, share.start, config.hidden_size, weights.ranks)


def _load_head(config: ModelConfig, weights: Weights, embedding: Table) -> Head | VocabularyParallelHead:
    """`embedding`: this rank's rows of it; a tied head has the same share of the vocabulary."""
    hidden, share = config.hidden_size, vocabulary_share(config.vocab_size, weights.ranks)
    if not config.tie_word_embeddings:
        with weights.wide_products():
            linear = weights.linear({"lm_head": Cut(config.vocab_size, (share,))}, hidden)
    else:
        linear = embedding.as_head() or _head_of_table(weights, embedding)
    return Head(linear) if weights.ranks.size == 1 else VocabularyParallelHead(linear, config.vocab_size, weights.ranks)


def _head_of_table(weights: Weights, embedding: Table) -> Linear:
    """The head of a dense table: its own memory, or a copy that lies as products want it."""
    if not isinstance(embedding, DenseTable):
        raise TypeError(type(embedding).__name__)
    weight = embedding.weight.t()
    if weights.memory.holds_sixteen_bits:  # on the meta device: counted with the table
        return DenseLinear(weight, None)
    copy_bytes = weight.numel() * weight.element_size()
    if not weights.is_output_major(weight.numel()) and copy_bytes <= TIED_HEAD_COPY_LIMIT_BYTES:
        weight = weights.empty(*weight.shape).copy_(weight)
    return weights.linear_of(weight)
