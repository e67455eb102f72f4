"""DeepSeek-V2 (arXiv 2405.04434), V2-Lite and V3 (arXiv 2412.19437): latent attention and many small experts.

Multi-head latent attention (MLA). Each token keeps one latent vector and one rotated key part for all heads, instead
of keys and values of each. With `key = up_k(latent)` and `value = up_v(latent)`, a score `query . up_k(latent)` equals
`up_k^T(query) . latent`: the projections move from the cached tokens to the query and to the result, and attention is
that of H query heads over one head of `kv_lora_rank + qk_rope_head_dim` elements. Nothing is ever expanded.

    cached row     [ latent (kv_lora_rank) | rotated key (qk_rope_head_dim) ]
    query of head  [ up_k^T(query part)    | rotated query part             ]
    attended       [ latent mix            | dropped ]  -> up_v -> output

Ranks share the heads; the latent, which has none, each of them computes and caches whole.

The checkpoints pair neighbouring elements for rotation; the weights' rows are put in the half-split order of `rotate_`
at load, which no score can tell.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from millstream_runtime.models.config.fields import Fields
from millstream_runtime.models.config.model_config import ModelConfig, architecture_of, common_fields
from millstream_runtime.models.config.rope_config import read_rope, yarn_mscale
from millstream_runtime.models.layers.attention import AttentionSpec, Step
from millstream_runtime.models.layers.decoder import Decoder, pre_norm_layer
from millstream_runtime.models.layers.mlp import Mlp, gated_mlp
from millstream_runtime.models.layers.moe import Router, read_experts, sparse_mlp
from millstream_runtime.models.layers.rope import rotate_
from millstream_runtime.models.layers.torch_layers import layers_of
from millstream_runtime.models.linear.linear import Linear, Projection
from millstream_runtime.models.linear.shares import Cut, even_share
from millstream_runtime.models.loading.layer_kernels import RouterSpec, TensorLayer
from millstream_runtime.models.loading.weights import Weights

LATENT_NORM_EPS = 1e-6  # of the latents' norms, whatever rms_norm_eps says
EXPERT_SIZE = "moe_intermediate_size"  # as config.json says
DEEPSEEK_V3 = "DeepseekV3ForCausalLM"
TOPK_METHODS = ("greedy", "group_limited_greedy")  # V2


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekConfig(ModelConfig):
    """`head_dim` is that of the rotated part; `intermediate_size` that of the dense layers."""

    q_lora_rank: int | None
    kv_lora_rank: int
    nope_head_dim: int  # the part of a query or key that does not turn
    value_head_dim: int
    rope_interleave: bool  # whether the checkpoint pairs neighbours
    first_sparse_layer: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    expert_intermediate_size: int
    num_groups: int  # of experts; 1 where the router knows none
    top_k_groups: int
    routed_scaling_factor: float
    sigmoid_shares: bool  # V3: sigmoid, a bias for the choice alone
    normalise_shares: bool

    @property
    def kv_shape(self) -> tuple[int, int]:
        return 1, self.kv_lora_rank + self.head_dim

    @property
    def has_plain_attention(self) -> bool:
        return False

    @property
    def has_experts(self) -> bool:
        return True

    @property
    def attention_scale(self) -> float:
        """YaRN's temperature, if asked for on all of a head, is on the scores here (squared: query and key)."""
        mscale = yarn_mscale(self.rope.factor, self.rope.mscale_all_dim) if self.rope.mscale_all_dim else 1.0
        return float((self.nope_head_dim + self.head_dim) ** -0.5 * mscale**2)


def read_config(fields: Fields) -> DeepseekConfig:
    """Either generation, by `architectures`."""
    return _read_v3(fields) if architecture_of(fields) == DEEPSEEK_V3 else _read_v2(fields)


def _read_v2(fields: Fields) -> DeepseekConfig:
    method = fields.get("topk_method", "greedy")
    if method not in TOPK_METHODS:
        raise fields.unsupported("topk_method", method, ", ".join(TOPK_METHODS))
    if fields.flag("norm_topk_prob"):
        raise fields.unsupported("norm_topk_prob", True, "false, as in every published DeepSeek-V2")
    return _read(fields, grouped=method == "group_limited_greedy", is_v3=False)


def _read_v3(fields: Fields) -> DeepseekConfig:
    return _read(fields, grouped=True, is_v3=True)


def build(config: DeepseekConfig, weights: Weights) -> Decoder:
    layers = [
        pre_norm_layer(config, weights, layer, _attention(config, weights, layer), _mlp(config, weights, layer))
        for layer in range(config.num_layers)
    ]
    return Decoder(config, weights, layers)


@dataclass(frozen=True, slots=True)
class LatentQuery:
    """The query through a bottleneck of its own: `up(norm(down(x)))`."""

    down: Linear
    norm: TensorLayer
    up: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.up(self.norm(self.down(x)))


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """MLA in its absorbed form; see the top of the file. Heads are those of this rank."""

    layer: int
    spec: AttentionSpec
    num_heads: int
    query: Linear | LatentQuery  # hidden -> H (nope + rope)
    latent: Linear  # hidden -> latent + rope
    latent_norm: TensorLayer
    key_up: Tensor  # [H, nope, latent]
    value_up: Tensor  # [H, latent, value]
    output: Projection  # H value -> hidden

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        _, nope, rank = self.key_up.shape
        rotation = step.rotations[0]
        row = self.latent(x)
        row[:, :rank] = self.latent_norm(row[:, :rank].contiguous())
        rotate_(row[:, rank:].unsqueeze(1), *rotation)

        query = self.query(step.attending(x))
        num_queries, width = query.shape
        query = query.view(num_queries, self.num_heads, width // self.num_heads)
        rotate_(query[..., nope:], *(step.attending(angles) for angles in rotation))
        absorbed = torch.bmm(query[..., :nope].transpose(0, 1), self.key_up).transpose(0, 1)
        absorbed = torch.cat((absorbed, query[..., nope:]), dim=-1)

        attended = step.attention(self.layer, absorbed, row.unsqueeze(1), self.spec)
        by_head = attended.view(num_queries, self.num_heads, rank).transpose(0, 1)
        return torch.bmm(by_head, self.value_up).transpose(0, 1).flatten(1)


@dataclass(frozen=True, slots=True)
class GroupedRouter:
    """V2 and V3: experts stand in groups, and a token may only choose from its best groups. All in float32.

    V2 takes shares from a softmax and judges a group by its best expert. V3 takes them from a sigmoid and chooses, but
    does not weigh, by share plus a learned bias, judging a group by its two best (auxiliary-loss-free balancing).
    """

    gate: Tensor  # [experts, hidden], float32
    bias: Tensor | None  # [experts], float32; V3
    top_k: int
    num_groups: int
    top_k_groups: int
    scaling_factor: float
    normalise: bool

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(x.to(self.gate.dtype), self.gate)
        shares = logits.softmax(dim=-1) if self.bias is None else logits.sigmoid()
        choice = shares if self.bias is None else shares + self.bias
        if self.num_groups > 1:
            choice = self._within_best_groups(choice)
        experts = choice.topk(self.top_k, dim=-1).indices
        chosen = shares.gather(1, experts)
        if self.normalise:
            chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20)
        return chosen * self.scaling_factor, experts

    @property
    def spec(self) -> RouterSpec:
        groups, best = self.num_groups, self.top_k_groups
        return RouterSpec(self.gate, self.top_k, self.normalise, self.bias, self.scaling_factor, groups, best)

    def _within_best_groups(self, choice: Tensor) -> Tensor:
        groups = choice.view(choice.shape[0], self.num_groups, -1)
        judged = groups.amax(dim=-1) if self.bias is None else groups.topk(2, dim=-1).values.sum(dim=-1)
        best = judged.topk(self.top_k_groups, dim=-1).indices
        closed = torch.ones_like(judged, dtype=torch.bool).scatter_(1, best, value=False)
        return groups.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(1)


def _attention(config: DeepseekConfig, weights: Weights, layer: int) -> LatentAttention:
    prefix = f"model.layers.{layer}.self_attn"
    rank, nope, value, rope = config.kv_lora_rank, config.nope_head_dim, config.value_head_dim, config.head_dim
    latent = weights.linear({f"{prefix}.kv_a_proj_with_mqa": rank + rope}, config.hidden_size, config.attention_bias)
    up = weights.dense_weight(f"{prefix}.kv_b_proj", _heads(config, weights, nope + value), rank)
    up = up.view(-1, nope + value, rank)
    return LatentAttention(
        layer=layer,
        spec=AttentionSpec(config.attention_scale, latent_dim=rank),
        num_heads=len(up),
        query=_query(config, weights, prefix),
        latent=_half_split(latent, config, 1, rank),
        latent_norm=layers_of(weights).rms_norm(
            weights.tensor(f"{prefix}.kv_a_layernorm.weight", rank), LATENT_NORM_EPS
        ),
        key_up=up[:, :nope].contiguous(),
        value_up=up[:, nope:].transpose(1, 2).contiguous(),
        output=weights.output_linear(
            f"{prefix}.o_proj", config.hidden_size, _heads(config, weights, value), config.attention_bias
        ),
    )


def _heads(config: DeepseekConfig, weights: Weights, elements: int) -> Cut:
    """This rank's heads, of `elements` each, among all."""
    share = even_share(config.num_heads, weights.ranks, "num_attention_heads")
    return Cut(config.num_heads * elements, (range(share.start * elements, share.stop * elements),))


def _query(config: DeepseekConfig, weights: Weights, prefix: str) -> Linear | LatentQuery:
    size, rank = config.nope_head_dim + config.head_dim, config.q_lora_rank
    outputs = _heads(config, weights, size)
    num_heads = outputs.size // size
    if rank is None:
        query = weights.linear({f"{prefix}.q_proj": outputs}, config.hidden_size)
        return _half_split(query, config, num_heads, config.nope_head_dim)
    up = weights.linear({f"{prefix}.q_b_proj": outputs}, rank)
    return LatentQuery(
        down=weights.linear({f"{prefix}.q_a_proj": rank}, config.hidden_size, config.attention_bias),
        norm=layers_of(weights).rms_norm(weights.tensor(f"{prefix}.q_a_layernorm.weight", rank), LATENT_NORM_EPS),
        up=_half_split(up, config, num_heads, config.nope_head_dim),
    )


def _half_split(linear: Linear, config: DeepseekConfig, num_heads: int, unrotated: int) -> Linear:
    """Outputs of each head reordered: its unrotated ones, then the first of every rotated pair, then the second."""
    if not config.rope_interleave:
        return linear
    size = unrotated + config.head_dim
    head = [*range(unrotated), *range(unrotated, size, 2), *range(unrotated + 1, size, 2)]
    return linear.reordered([start + element for start in range(0, num_heads * size, size) for element in head])


def _mlp(config: DeepseekConfig, weights: Weights, layer: int) -> Mlp:
    prefix, hidden = f"model.layers.{layer}.mlp", config.hidden_size
    if layer < config.first_sparse_layer:
        return gated_mlp(config, weights, prefix, config.intermediate_size)
    bias = f"{prefix}.gate.e_score_correction_bias"
    router: Router = GroupedRouter(
        gate=weights.tensor(f"{prefix}.gate.weight", config.num_experts, hidden, dtype=torch.float32),
        bias=weights.tensor(bias, config.num_experts, dtype=torch.float32) if config.sigmoid_shares else None,
        top_k=config.num_experts_per_token,
        num_groups=config.num_groups,
        top_k_groups=config.top_k_groups,
        scaling_factor=config.routed_scaling_factor,
        normalise=config.normalise_shares,
    )
    shared_size = config.num_shared_experts * config.expert_intermediate_size
    return sparse_mlp(
        weights,
        router,
        [f"{prefix}.experts.{expert}" for expert in range(config.num_experts)],
        hidden,
        config.expert_intermediate_size,
        size_field=EXPERT_SIZE,
        shared=gated_mlp(
            config, weights, f"{prefix}.shared_experts", shared_size, size_field=EXPERT_SIZE, partial_sum=True
        ),
    )


def _read(fields: Fields, *, grouped: bool, is_v3: bool) -> DeepseekConfig:
    if fields.get("moe_layer_freq", 1) != 1:
        raise fields.unsupported("moe_layer_freq", fields.get("moe_layer_freq"), "1")
    rope_head_dim = fields.integer("qk_rope_head_dim")
    rope = read_rope(fields, rope_head_dim)
    common = common_fields(fields, head_dim=rope_head_dim, rope=rope) | {"head_dim": rope_head_dim}
    if is_v3:
        common["mlp_bias"] = False
    num_experts, top_k = read_experts(fields, "n_routed_experts")
    num_groups, top_k_groups = _groups(fields, num_experts, top_k) if grouped else (1, 1)
    return DeepseekConfig(
        **common,
        q_lora_rank=fields.optional_integer("q_lora_rank"),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        nope_head_dim=fields.integer("qk_nope_head_dim"),
        value_head_dim=fields.integer("v_head_dim"),
        rope_interleave=fields.flag("rope_interleave", True) if is_v3 else True,
        first_sparse_layer=_first_sparse_layer(fields),
        num_experts=num_experts,
        num_experts_per_token=top_k,
        num_shared_experts=fields.integer("n_shared_experts"),
        expert_intermediate_size=fields.integer(EXPERT_SIZE),
        num_groups=num_groups,
        top_k_groups=top_k_groups,
        routed_scaling_factor=fields.number("routed_scaling_factor", 2.5 if is_v3 else 1.0),
        sigmoid_shares=is_v3,
        normalise_shares=is_v3 and fields.flag("norm_topk_prob", True),
    )


def _groups(fields: Fields, num_experts: int, top_k: int) -> tuple[int, int]:
    groups, best = fields.integer("n_group"), fields.integer("topk_group")
    if num_experts % groups or best > groups or best * (num_experts // groups) < top_k:
        raise fields.invalid(
            "n_group",
            f"{groups}; {num_experts} experts must divide into it, and {best} groups must hold {top_k} of them",
        )
    return groups, best


def _first_sparse_layer(fields: Fields) -> int:
    value = fields.get("first_k_dense_replace")
    if not isinstance(value, int) or value < 0:
        raise fields.invalid("first_k_dense_replace", f"{value!r}; it must be an integer of at least 0")
    return value
