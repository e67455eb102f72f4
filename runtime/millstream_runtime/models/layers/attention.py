"""Attention as a model sees it: what it asks of the engine, and the block of queries, keys and values around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from millstream_runtime.models.config.model_config import ModelConfig
from millstream_runtime.models.layers.norm import HeadNorm
from millstream_runtime.models.layers.rope import rotate_
from millstream_runtime.models.layers.torch_layers import layers_of
from millstream_runtime.models.linear.linear import Linear, Projection
from millstream_runtime.models.linear.shares import Cut, heads_of, side_by_side
from millstream_runtime.models.loading.layer_kernels import PoolPlace, RopeWrite
from millstream_runtime.models.loading.weights import Weights


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """How the scores of one layer are made."""

    scale: float  # on query times key
    window: int | None = None  # tokens that a token sees, itself included; None is all
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    latent_dim: int | None = None  # all heads share one key, and its first elements are the value (MLA)


class Attention(Protocol):
    """What a model asks of the engine, once a layer: store these keys and values, then attend."""

    def __call__(self, layer: int, query: Tensor, key_value: Tensor, spec: AttentionSpec) -> Tensor:
        """`query`: `[T, H, D]`; `key_value`: `[T, 2 * KV, D]`, keys first, or `[T, 1, D]` with `latent_dim`.

        Returns `[T, H * D]`, or `[T, H * latent_dim]`. That of `ReadRows` has a query for each of its rows alone.
        """

    def place(self, layer: int) -> PoolPlace:
        """Where the keys and values of this step go; who stores them there asks `attend` for the rest."""

    def attend(self, layer: int, query: Tensor, spec: AttentionSpec) -> Tensor:
        """The same with keys and values that are stored already."""


@dataclass(frozen=True, slots=True)
class ReadRows:
    """The rows of a step that are read behind the last layer, which computes no others, but for keys and values."""

    rows: Tensor  # [R] int64, ascending
    attention: Attention  # of their queries; it stores the keys and values of all rows


@dataclass(frozen=True, slots=True)
class Step:
    """What all layers of one forward pass share."""

    rotations: list[tuple[Tensor, Tensor]]  # cosines and signed sines `[T, 1, rotary_dim]`, one pair a rotary table
    attention: Attention
    positions: Tensor  # [T] int64, rows of the rotary tables
    angles: Sequence[tuple[Tensor, Tensor]] = ()  # whole tables for a kernel, in place of `rotations`; see `Decoder`
    rows: Tensor | None = None  # of the queries that attend, [R] int64; None: all

    def attending(self, x: Tensor) -> Tensor:
        """The rows of `x` `[T, ..]` whose queries attend."""
        return x if self.rows is None else x.index_select(0, self.rows)


class AttentionBlock(Protocol):
    """Normed hidden states to attended heads; `output` brings these back to the residual stream."""

    @property
    def output(self) -> Projection: ...

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """`[T, hidden]` to `[T, heads * value size]`, of `step.rows` alone where it names some."""


@dataclass(frozen=True, slots=True)
class GroupedQueryAttention:
    """H query heads over KV key and value heads (Ainslie et al. 2023, arXiv 2305.13245). Q, K and V are one product.

    Heads are those of this rank.
    """

    layer: int
    spec: AttentionSpec
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv: Linear  # hidden -> (H + 2 KV) D: queries, keys, values
    output: Projection  # H D -> hidden
    rotation: int = 0  # which of Step.rotations
    qk_norm: HeadNorm | None = None  # of each query and key head
    rope_write: RopeWrite | None = None  # a kernel that norms, rotates and stores at once

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        if self.rope_write is not None:
            place, angles = step.attention.place(self.layer), step.angles[self.rotation]
            query = self.rope_write(qkv, self.num_heads, angles, step.positions, place)
            return step.attention.attend(self.layer, step.attending(query), self.spec)
        rotated = qkv[:, : self.num_heads + self.num_kv_heads]
        if self.qk_norm is not None:
            self.qk_norm.norm_first(qkv)
        rotate_(rotated, *step.rotations[self.rotation])
        query = step.attending(qkv[:, : self.num_heads])
        return step.attention(self.layer, query, qkv[:, self.num_heads :], self.spec)


def grouped_query_attention(
    config: ModelConfig,
    weights: Weights,
    layer: int,
    *,
    spec: AttentionSpec | None = None,
    output_bias: bool = False,
    in_features: int | None = None,
    fused: bool = False,
    rotation: int = 0,
    qk_norm: Tensor | None = None,
) -> GroupedQueryAttention:
    """Load one from `model.layers.N.self_attn`.

    Args:
        spec: where it is not the usual scale with the config's window.
        in_features: of queries, keys and values, where it is not the hidden size.
        fused: whether the checkpoint has one `qkv_proj` instead of three.
        qk_norm: `qk_norm_of` the layer's two norm weights.

    Raises:
        InvalidConfigError: the heads do not divide among the ranks.
    """
    prefix = f"model.layers.{layer}.self_attn"
    heads = heads_of(config, weights.ranks)
    query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    query, kv = heads.elements(heads.query), heads.elements(heads.kv)
    parts = (
        {"qkv_proj": side_by_side([query_size, kv_size, kv_size], [query, kv, kv])}
        if fused
        else {"q_proj": Cut(query_size, (query,)), "k_proj": Cut(kv_size, (kv,)), "v_proj": Cut(kv_size, (kv,))}
    )
    return GroupedQueryAttention(
        layer=layer,
        spec=spec or AttentionSpec(config.head_dim**-0.5, config.window(layer)),
        num_heads=heads.num_query,
        num_kv_heads=heads.num_kv,
        head_dim=config.head_dim,
        qkv=weights.linear(
            {f"{prefix}.{name}": size for name, size in parts.items()},
            in_features or config.hidden_size,
            config.attention_bias,
        ),
        output=weights.output_linear(f"{prefix}.o_proj", config.hidden_size, Cut(query_size, (query,)), output_bias),
        rotation=rotation,
        qk_norm=None if qk_norm is None else HeadNorm(qk_norm, config.rms_norm_eps),
        rope_write=layers_of(weights).rope_write(qk_norm, config.rms_norm_eps),
    )


def qk_norm_of(config: ModelConfig, weights: Weights, query: Tensor, key: Tensor) -> Tensor:
    """Norm weights of a query and of a key head, each `[D]`, repeated for every head of this rank: `[H + KV, D]`."""
    share = heads_of(config, weights.ranks)
    heads = query.new_empty(share.num_query + share.num_kv, config.head_dim)
    heads[: share.num_query], heads[share.num_query :] = query, key
    return heads
