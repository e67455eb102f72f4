"""Multi-head latent attention (MLA) with experts: DeepSeek V2 and V3 (arXiv 2405.04434, 2412.19437).

Keys and values are kept as one latent of `kv_lora_rank` and a shared rotary part of `qk_rope_head_dim` a layer, so the
cache does not shrink with more ranks: every rank keeps the whole latent.
"""

from __future__ import annotations

from millstream_operator.catalog.config_fields import ConfigFields
from millstream_operator.catalog.model_shape import ModelShape, Parameters
from millstream_runtime.model_families import LatentTraits, ModelFamily


def read(fields: ConfigFields, family: ModelFamily, traits: LatentTraits) -> ModelShape:
    """A DeepSeek model; the first layers may be dense."""
    hidden, layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    heads, vocabulary = fields.integer("num_attention_heads"), fields.integer("vocab_size")
    latent, rope = fields.integer("kv_lora_rank"), fields.integer("qk_rope_head_dim")
    down, up, norms = _attention(fields, hidden, heads)
    intermediate, width = fields.integer("intermediate_size"), fields.integer("moe_intermediate_size")
    dense, num_experts = fields.integer("first_k_dense_replace", 0), fields.integer("n_routed_experts", 0)
    _check(fields, layers, dense, num_experts)
    sparse = layers - dense
    value_and_key = fields.integer("qk_nope_head_dim") + fields.integer("v_head_dim")
    experts = num_experts * 3 * hidden * width
    shared = fields.integer("n_shared_experts", 0) * width
    widths = {intermediate, width} | ({shared} if shared else set())
    return ModelShape(
        family=family.model_type,
        architecture=family.architecture,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_size=fields.integer("v_head_dim"),
        intermediate_sizes=tuple(sorted(widths)),
        vocab_size=vocabulary,
        max_position_embeddings=fields.integer("max_position_embeddings"),
        parameters=Parameters(
            embedding=vocabulary * hidden,
            attention=layers * (down + up),
            mlp=3 * hidden * (dense * intermediate + sparse * shared),
            experts=sparse * experts,
            routers=sparse * (num_experts * hidden + (num_experts if traits.router_bias else 0)),
            norms=layers * (2 * hidden + norms) + hidden,
            head=0 if fields.flag("tie_word_embeddings") else vocabulary * hidden,
        ),
        replicated_attention_parameters=layers * down,
        latent_up_parameters=layers * latent * heads * value_and_key,
        latent_kv_elements=latent + rope,
        num_experts=num_experts,
        num_experts_per_token=fields.integer("num_experts_per_tok", None if num_experts else 0),
        # Each has a sparse layer, a projection of two streams, and copies of embedding and head.
        extra_parameters=fields.integer("num_nextn_predict_layers", 0)
        * (down + up + experts + 3 * hidden * shared + 2 * hidden * hidden + 2 * vocabulary * hidden),
    )


def _check(fields: ConfigFields, layers: int, dense: int, num_experts: int) -> None:
    """Refuse numbers of layers and expert groups that contradict each other."""
    if dense > layers:
        raise fields.contradiction(f"first_k_dense_replace is {dense}; the model has {layers} layers")
    groups = fields.integer("n_group", 1)
    if num_experts and num_experts % groups:
        raise fields.contradiction(f"n_group is {groups}; it must divide n_routed_experts ({num_experts})")
    if (used := fields.integer("topk_group", 1)) > groups:
        raise fields.contradiction(f"topk_group is {used}; there are {groups} groups (n_group)")


def _attention(fields: ConfigFields, hidden: int, heads: int) -> tuple[int, int, int]:
    """One layer: down projections (whole on every rank), the rest (cut by heads), norms of the latents."""
    latent, rope = fields.integer("kv_lora_rank"), fields.integer("qk_rope_head_dim")
    nope, value = fields.integer("qk_nope_head_dim"), fields.integer("v_head_dim")
    query_rank = fields.optional("q_lora_rank")  # null in the Lite models: queries are not compressed
    query = heads * (nope + rope)
    down = hidden * (latent + rope)
    up = latent * heads * (nope + value) + heads * value * hidden
    if query_rank is None:
        return down, up + hidden * query, latent
    return down + hidden * query_rank, up + query_rank * query, latent + query_rank
