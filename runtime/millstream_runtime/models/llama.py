"""Llama family (Llama 2 and 3, and every folder whose architecture is LlamaForCausalLM).

One step computes T tokens of any mix of requests, one after another; only attention knows who owns which.

Layout. A linear weight is kept as `[in, out]`, the transpose of the checkpoint's: `x @ W` then walks memory in
order, which on a CPU is 1.2 to 2.3 times as fast as the transposed product at 4 to 16 rows. Q, K and V are one product,
and so are gate and up; output projections add into the residual stream (`addmm_`) instead of beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from millstream_runtime.models.checkpoint import Checkpoint, check_finite
from millstream_runtime.models.config import ModelConfig
from millstream_runtime.models.rope import rotary_table, rotate_

# A tied output head shares the embedding. It is copied into [in, out] order while that costs less than this.
TIED_HEAD_COPY_LIMIT_BYTES = 128 << 20


class Attention(Protocol):
    """What a model asks of the engine, once a layer: store these keys and values, then attend."""

    def __call__(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        """`query`: `[T, H, D]`; `key_value`: `[T, 2 * KV, D]`, keys first. Returns `[T, H * D]`."""


@dataclass(frozen=True, slots=True)
class Linear:
    """`x @ weight + bias`; `weight`: `[in, out]`."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, in]` to `[T, out]`."""
        return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """`residual += self(x)` in place, as one product."""
        residual.addmm_(x, self.weight)
        if self.bias is not None:
            residual.add_(self.bias)


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """Weights of one decoder layer."""

    input_norm: Tensor  # [hidden]
    qkv: Linear  # hidden -> (H + 2 KV) D: queries, keys, values
    output: Linear  # H D -> hidden
    post_attention_norm: Tensor  # [hidden]
    gate_up: Linear  # hidden -> 2 intermediate: gate, up
    down: Linear  # intermediate -> hidden


class Llama:
    """A loaded model. `forward` gives hidden states; `logits` only for the rows that a token is sampled from."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        """Check every tensor of the checkpoint, then load.

        Raises:
            RuntimeFailure: CheckpointInvalid, naming file and tensor.
        """
        checkpoint.check(expected_tensors(config))
        self.config = config
        self._load = _Loader(checkpoint, dtype, device)
        self._embedding = self._load.tensor("model.embed_tokens.weight")  # [vocab, hidden]
        self._layers = [self._load_layer(index) for index in range(config.num_layers)]
        self._norm = self._load.tensor("model.norm.weight")
        self._head = self._load_head()  # [hidden, vocab]
        self._cos, self._sin = (
            table.to(dtype) for table in rotary_table(config.rope, config.head_dim, config.max_model_len, device)
        )
        self.weight_bytes = self._load.loaded_bytes
        del self._load

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """`token_ids`, `positions`: `[T]` int64. Returns the last layer's residual stream `[T, hidden]`, not normed."""
        config = self.config
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
        residual = F.embedding(token_ids, self._embedding)
        num_tokens, rotated = token_ids.shape[0], config.num_heads + config.num_kv_heads
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(self._normalise(residual, layer.input_norm)).view(num_tokens, -1, config.head_dim)
            rotate_(qkv[:, :rotated], cos, sin)
            attended = attention(index, qkv[:, : config.num_heads], qkv[:, config.num_heads :])
            layer.output.add_to(residual, attended)
            gate, up = layer.gate_up(self._normalise(residual, layer.post_attention_norm)).chunk(2, dim=-1)
            layer.down.add_to(residual, F.silu(gate).mul_(up))
        return residual

    def logits(self, residual: Tensor) -> Tensor:
        """`[rows, hidden]` from `forward` to `[rows, vocab]`, in the model's dtype."""
        return torch.mm(self._normalise(residual, self._norm), self._head)

    def _normalise(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.rms_norm_eps)

    def _load_layer(self, index: int) -> LlamaLayer:
        load, prefix = self._load, f"model.layers.{index}"
        attention_bias, mlp_bias = self.config.attention_bias, self.config.mlp_bias
        qkv = [f"{prefix}.self_attn.{name}_proj" for name in ("q", "k", "v")]
        return LlamaLayer(
            input_norm=load.tensor(f"{prefix}.input_layernorm.weight"),
            qkv=load.linear(qkv, attention_bias),
            output=load.linear([f"{prefix}.self_attn.o_proj"], attention_bias),
            post_attention_norm=load.tensor(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=load.linear([f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"], mlp_bias),
            down=load.linear([f"{prefix}.mlp.down_proj"], mlp_bias),
        )

    def _load_head(self) -> Tensor:
        if not self.config.tie_word_embeddings:
            return self._load.linear(["lm_head"], bias=False).weight
        head = self._embedding.t()
        if head.numel() * head.element_size() > TIED_HEAD_COPY_LIMIT_BYTES:
            return head
        self._load.loaded_bytes += head.numel() * head.element_size()
        return head.contiguous()


def expected_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor that a checkpoint of this configuration must hold."""
    hidden, query_size = config.hidden_size, config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        linears = {
            "self_attn.q_proj": (query_size, hidden, config.attention_bias),
            "self_attn.k_proj": (kv_size, hidden, config.attention_bias),
            "self_attn.v_proj": (kv_size, hidden, config.attention_bias),
            "self_attn.o_proj": (hidden, query_size, config.attention_bias),
            "mlp.gate_proj": (config.intermediate_size, hidden, config.mlp_bias),
            "mlp.up_proj": (config.intermediate_size, hidden, config.mlp_bias),
            "mlp.down_proj": (hidden, config.intermediate_size, config.mlp_bias),
        }
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        for name, (out_features, in_features, has_bias) in linears.items():
            yield f"{prefix}.{name}.weight", (out_features, in_features)
            if has_bias:
                yield f"{prefix}.{name}.bias", (out_features,)
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


class _Loader:
    """Checkpoint tensors in the engine's dtype, device and layout, counting what they take."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self.loaded_bytes = 0

    def tensor(self, name: str) -> Tensor:
        """As it is in the checkpoint, but never the mapped file itself: that may be replaced under a running server."""
        source = self._checkpoint.read(name)
        check_finite(name, source)
        loaded = source.to(device=self._device, dtype=self._dtype, copy=True)
        self.loaded_bytes += loaded.numel() * loaded.element_size()
        return loaded

    def linear(self, names: list[str], bias: bool) -> Linear:
        """Linears that share their input, side by side in one weight `[in, sum of outs]`."""
        weight = torch.cat([self.tensor(f"{name}.weight") for name in names]).t().contiguous()
        return Linear(weight, torch.cat([self.tensor(f"{name}.bias") for name in names]) if bias else None)
