"""Gemma 2 (arXiv 2408.00118) and the text models of Gemma 3 (arXiv 2503.19786).

What sets them apart from Llama: norms before *and* after each block, with weights stored minus one; embeddings times
the square root of the hidden size; a tanh-approximated GELU; layers with a sliding window among full ones. Gemma 2 caps
scores and logits by tanh; Gemma 3 norms queries and keys instead and turns windowed layers by a shorter base.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millstream_runtime.layer_windows import FULL, SLIDING
from millstream_runtime.logs import log
from millstream_runtime.models.config.fields import Fields
from millstream_runtime.models.config.model_config import ModelConfig, architecture_of, common_fields
from millstream_runtime.models.config.rope_config import RopeConfig, rope_section, scaled_rope
from millstream_runtime.models.layers.attention import (
    AttentionBlock,
    AttentionSpec,
    Step,
    grouped_query_attention,
    qk_norm_of,
)
from millstream_runtime.models.layers.decoder import Decoder
from millstream_runtime.models.layers.mlp import GatedMlp, gated_mlp
from millstream_runtime.models.layers.torch_layers import gelu_tanh, layers_of
from millstream_runtime.models.loading.layer_kernels import TensorLayer
from millstream_runtime.models.loading.weights import Weights

ACTIVATION = ("hidden_activation", "gelu_pytorch_tanh")
GEMMA3 = "Gemma3ForCausalLM"
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0  # Gemma 3
NORMS = ("input", "post_attention", "pre_feedforward", "post_feedforward")


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaConfig(ModelConfig):
    """Gemma 3 has `qk_norm` and `local_rope`."""

    query_pre_attn_scalar: float  # scores are divided by its square root
    attention_softcap: float | None
    logit_softcap: float | None
    qk_norm: bool = False
    local_rope: RopeConfig | None = None  # of the layers with a window; `rope` is that of the others

    @property
    def has_plain_attention(self) -> bool:
        return not self.windows and self.attention_softcap is None


def read_config(fields: Fields) -> GemmaConfig:
    """Either generation, by `architectures`."""
    return _read_gemma3(fields) if architecture_of(fields) == GEMMA3 else _read_gemma2(fields)


def _read_gemma2(fields: Fields) -> GemmaConfig:
    attention_softcap = fields.optional_number("attn_logit_softcapping", 50.0)
    return _read(fields, common_fields(fields, activation=ACTIVATION), attention_softcap, logit_softcap=30.0)


def _read_gemma3(fields: Fields) -> GemmaConfig:
    rope, local_rope = _read_ropes(fields, fields.integer("head_dim"))
    common = common_fields(fields, activation=ACTIVATION, rope=rope)
    # transformers caps no scores of a Gemma 3, whatever attn_logit_softcapping says.
    return _read(fields, common | {"qk_norm": True, "local_rope": local_rope}, None, logit_softcap=None)


def build(config: GemmaConfig, weights: Weights) -> Decoder:
    layers = [_load_layer(config, weights, layer) for layer in range(config.num_layers)]
    return GemmaDecoder(config, weights, layers, more_ropes=[config.local_rope] if config.local_rope else [])


@dataclass(frozen=True, slots=True)
class GemmaLayer:
    """`x += norm(attention(norm(x))); x += norm(mlp(norm(x)))`."""

    attention: AttentionBlock
    mlp: GatedMlp
    norms: tuple[TensorLayer, ...]  # four, in the order of NORMS; their weights are float32 or wider

    def __call__(self, residual: Tensor, step: Step) -> None:
        self.finish(residual, self.attend(residual, step))

    def attend(self, residual: Tensor, step: Step) -> Tensor:
        before_attention, *_ = self.norms
        return self.attention(before_attention(residual), step)

    def finish(self, residual: Tensor, attended: Tensor) -> None:
        _, after_attention, before_mlp, after_mlp = self.norms
        residual.add_(after_attention(self.attention.output(attended)))
        residual.add_(after_mlp(self.mlp(before_mlp(residual))))


class GemmaDecoder(Decoder):
    """Scaled embeddings, wide norms, and logits capped where the config says so."""

    config: GemmaConfig

    def logits(self, residual: Tensor) -> Tensor:
        logits = super().logits(residual)
        cap = self.config.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def embed(self, token_ids: Tensor) -> Tensor:
        # The root is rounded to the model's type first: 55.4256 is 55.5 in bfloat16, and trained as that.
        root = torch.tensor(self.config.hidden_size**0.5).to(self.dtype).item()
        return super().embed(token_ids).mul_(root)

    def _load_norm(self, weights: Weights) -> Tensor:
        return _one_plus(weights, "model.norm.weight", self.config.hidden_size)


def _one_plus(weights: Weights, name: str, size: int) -> Tensor:
    """A norm's weight, which the checkpoint keeps minus one."""
    return weights.wide_tensor(name, size).add_(1)


def _load_layer(config: GemmaConfig, weights: Weights, layer: int) -> GemmaLayer:
    prefix, window = f"model.layers.{layer}", config.window(layer)
    qk_norm = None
    if config.qk_norm:
        names = (f"{prefix}.self_attn.{name}_norm.weight" for name in ("q", "k"))
        qk_norm = qk_norm_of(config, weights, *(_one_plus(weights, name, config.head_dim) for name in names))
    attention = grouped_query_attention(
        config,
        weights,
        layer,
        spec=AttentionSpec(config.query_pre_attn_scalar**-0.5, window, config.attention_softcap),
        output_bias=config.attention_bias,
        rotation=1 if window is not None and config.local_rope else 0,
        qk_norm=qk_norm,
    )
    norm_names = (f"{prefix}.{name}_layernorm.weight" for name in NORMS)
    return GemmaLayer(
        attention=attention,
        mlp=gated_mlp(config, weights, f"{prefix}.mlp", config.intermediate_size, activation=gelu_tanh),
        norms=tuple(
            layers_of(weights).rms_norm(_one_plus(weights, name, config.hidden_size), config.rms_norm_eps)
            for name in norm_names
        ),
    )


def _read(
    fields: Fields, common: dict[str, object], attention_softcap: float | None, *, logit_softcap: float | None
) -> GemmaConfig:
    """`logit_softcap`: where the file has none."""
    return GemmaConfig(
        **common | {"mlp_bias": False},  # type: ignore[arg-type]
        query_pre_attn_scalar=fields.number("query_pre_attn_scalar"),
        attention_softcap=attention_softcap,
        logit_softcap=fields.optional_number("final_logit_softcapping", logit_softcap),
    )


def _read_ropes(fields: Fields, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """Of full and of windowed layers: nested by layer type (transformers 5), or two bases and one scaling (before)."""
    nested = fields.section("rope_parameters") or Fields(fields.path, {})
    scaling = rope_section(fields, nested.section(FULL))
    older = fields.section("rope_scaling")
    if older is not None and older.get("type") and not older.get("rope_type") and nested.section(FULL) is None:
        scaling = _without_older_type(fields, scaling)
    local = nested.section(SLIDING) or Fields(fields.path, {})
    theta = scaling.number("rope_theta", fields.number("rope_theta", GLOBAL_THETA))
    local_theta = local.number("rope_theta", fields.number("rope_local_base_freq", LOCAL_THETA))
    return scaled_rope(fields, scaling, theta, head_dim), scaled_rope(fields, local, local_theta, head_dim)


def _without_older_type(fields: Fields, scaling: Fields) -> Fields:
    """`scaling` as transformers 5 reads it: a Gemma 3 has the type `default` where nothing says `rope_type`."""
    log.warning(
        "rope_scaling_ignored",
        file=str(fields.path),
        about=f"rope_scaling.type {scaling.get('type')!r:.80} scales nothing in a Gemma 3 of transformers 5, and so "
        "nothing here; write rope_type if the model was trained with it",
    )
    return Fields(fields.path, {name: value for name, value in scaling.values.items() if name != "type"})
