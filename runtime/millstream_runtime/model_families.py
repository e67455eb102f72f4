"""Every model family, one row per `model_type` of Hugging Face. The runtime, the planner and the docs derive from it.

    config.CAPABILITIES.model_families        rows with a module
    models/registry.py                        architecture -> the row's module of models/families/
    millstream_operator/catalog/families/     model_type -> parameter counts, from the row's traits
    docs/engine.md                            the table of families (`make crds`)

It imports nothing but the standard library, because the operator reads it too. CONTRIBUTING.md has the recipe for
adding a family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassDefaults:
    """What fields that a published config.json leaves out mean: the defaults of the family's class in `transformers`.

    Named as in config.json. None: a file without the field is refused, or another field decides.
    """

    max_position_embeddings: int = 2048
    rms_norm_eps: float | None = 1e-6
    rope_theta: float | None = 10_000.0  # None: the family has several
    tie_word_embeddings: bool = False
    vocab_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    query_pre_attn_scalar: int | None = None
    num_local_experts: int | None = None
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    n_routed_experts: int | None = None
    n_shared_experts: int | None = None
    moe_intermediate_size: int | None = None
    first_k_dense_replace: int | None = None
    n_group: int | None = None
    topk_group: int | None = None


# Fields of which `null` is no class default: as many as query heads; no bottleneck; no such experts.
NULL_IS_A_VALUE = ("num_key_value_heads", "q_lora_rank", "n_routed_experts", "n_shared_experts")
# ... and of which an inspection has always left out both, so that there a class default stands as a number.
STATED_IN_INSPECTIONS = NULL_IS_A_VALUE[1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseTraits:
    """How a dense decoder differs from Llama."""

    qkv_bias: bool = False
    norms_per_layer: int = 2
    query_key_norms: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTraits:
    """How a mixture of experts over ordinary attention names and counts its experts in config.json."""

    experts_field: str
    width_field: str
    qkv_bias: bool = False
    query_key_norms: bool = False
    every_layer: bool = False  # no layer is dense
    shared_expert: bool = False  # one more expert, which every token passes


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentTraits:
    """Multi-head latent attention with experts."""

    router_bias: bool = False  # one element per expert, which counts for the choice alone


@dataclass(frozen=True, slots=True, kw_only=True)
class FalconTraits:
    """Falcon: no gated MLP; its config.json says the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GptNeoxTraits:
    """GPT-NeoX: no gated MLP; its config.json says the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowTraits:
    """Which layers of a family have a sliding window, by `layer_windows.py`. Defaults are those of `transformers`."""

    default_tokens: int | None = None  # where config.json has no `sliding_window`; None: no window then
    on_request: bool = False  # only where `use_sliding_window` is true
    full_every: int | None = None  # each n-th layer attends to all tokens
    pattern_is_read: bool = False  # `sliding_window_pattern` takes the place of `full_every`
    first_full_layers: int | None = None  # where config.json has no `max_window_layers`, before which layers are full
    types_are_read: bool = False  # `layer_types` counts, though all layers are windowed where the file has none

    @property
    def in_every_layer(self) -> bool:
        """Whether all layers are windowed where config.json has no `layer_types`."""
        return self.full_every is None and self.first_full_layers is None


Traits = DenseTraits | ExpertTraits | LatentTraits | FalconTraits | GptNeoxTraits


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """One family: what it is called, who runs it, and how the planner counts it."""

    model_type: str  # of config.json; the name of the family everywhere
    architecture: str  # of config.json
    traits: Traits
    module: str | None = None  # of millstream_runtime.models.families; None: the planner knows it, no runtime runs it
    other_architectures: tuple[str, ...] = ()  # names under which models of the same tensors and fields are published
    vision_architectures: tuple[str, ...] = ()  # of models with a vision tower over this family; text alone is served
    aliases: tuple[str, ...] = ()  # other values of model_type, of older folders or of the language part alone
    models: str = ""  # which published models, where the architecture's name does not say it (docs)
    beyond_llama: str = ""  # what the module adds to Llama (docs)
    windows: WindowTraits | None = None  # None: every layer attends to all tokens
    defaults: ClassDefaults = ClassDefaults()  # of the fields that config.json leaves out


# Error messages list families in this order.
FAMILIES: tuple[ModelFamily, ...] = (
    ModelFamily(
        model_type="llama",
        architecture="LlamaForCausalLM",
        other_architectures=("LLaMAForCausalLM", "InternLM3ForCausalLM", "IQuestCoderForCausalLM"),
        module="llama",
        aliases=("internlm3", "iquestcoder"),
        models="Llama 2, 3 and kin",
        beyond_llama="rope `linear`, `llama3`, `yarn`, `dynamic`; biases; tied embeddings",
        traits=DenseTraits(),
    ),
    ModelFamily(
        model_type="mistral",
        architecture="MistralForCausalLM",
        other_architectures=("MinistralForCausalLM",),
        vision_architectures=("Mistral3ForConditionalGeneration",),
        module="mistral",
        aliases=("ministral",),
        beyond_llama="a sliding window in every layer, or in those that `layer_types` names (Ministral)",
        # Version 0.1 had no field for it; later ones say null.
        windows=WindowTraits(default_tokens=4096, types_are_read=True),
        traits=DenseTraits(),
        defaults=ClassDefaults(max_position_embeddings=131072, num_key_value_heads=8),
    ),
    ModelFamily(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        vision_architectures=("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
        module="qwen2",
        aliases=("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"),
        models="Qwen2, 2.5",
        beyond_llama="bias on Q, K, V; a window in later layers on request",
        windows=WindowTraits(default_tokens=4096, on_request=True, first_full_layers=28),
        traits=DenseTraits(qkv_bias=True),
        defaults=ClassDefaults(max_position_embeddings=32768),
    ),
    ModelFamily(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        vision_architectures=("Qwen3VLForConditionalGeneration",),
        module="qwen3",
        aliases=("qwen3_vl_text",),
        beyond_llama="RMS norm on query and key heads",
        windows=WindowTraits(default_tokens=4096, on_request=True, first_full_layers=28),
        traits=DenseTraits(query_key_norms=True),
        defaults=ClassDefaults(max_position_embeddings=32768, head_dim=128),
    ),
    ModelFamily(
        model_type="gemma",
        architecture="GemmaForCausalLM",
        traits=DenseTraits(),
        defaults=ClassDefaults(max_position_embeddings=8192, tie_word_embeddings=True, head_dim=256),
    ),
    ModelFamily(
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        module="gemma",
        beyond_llama="norms before and after each block, scaled embeddings, soft caps, alternating windows",
        windows=WindowTraits(default_tokens=4096, full_every=2),
        traits=DenseTraits(norms_per_layer=4),
        defaults=ClassDefaults(
            max_position_embeddings=8192,
            tie_word_embeddings=True,
            num_key_value_heads=4,
            head_dim=256,
            query_pre_attn_scalar=256,
        ),
    ),
    ModelFamily(
        model_type="gemma3",
        architecture="Gemma3ForCausalLM",
        vision_architectures=("Gemma3ForConditionalGeneration",),
        module="gemma",
        aliases=("gemma3_text",),
        beyond_llama="Q/K norm, a rotary base of its own for windowed layers",
        windows=WindowTraits(default_tokens=4096, full_every=6, pattern_is_read=True),
        traits=DenseTraits(norms_per_layer=4, query_key_norms=True),
        defaults=ClassDefaults(
            max_position_embeddings=131072,
            rope_theta=None,
            tie_word_embeddings=True,
            vocab_size=262208,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=256,
            query_pre_attn_scalar=256,
        ),
    ),
    ModelFamily(
        model_type="phi3",
        architecture="Phi3ForCausalLM",
        module="phi3",
        models="Phi-3, 3.5, 4, 4-mini",
        beyond_llama="fused tensors, partial rotary embedding, LongRoPE",
        windows=WindowTraits(),
        traits=DenseTraits(),
        defaults=ClassDefaults(max_position_embeddings=4096, rms_norm_eps=1e-5),
    ),
    ModelFamily(
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        module="mixtral",
        beyond_llama="routed experts",
        windows=WindowTraits(),
        traits=ExpertTraits(
            experts_field="num_local_experts",
            width_field="intermediate_size",
            every_layer=True,
        ),
        defaults=ClassDefaults(
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            rope_theta=1_000_000.0,
            num_key_value_heads=8,
            num_local_experts=8,
            num_experts_per_tok=2,
        ),
    ),
    ModelFamily(
        model_type="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        traits=ExpertTraits(
            experts_field="num_experts",
            width_field="moe_intermediate_size",
            qkv_bias=True,
            shared_expert=True,
        ),
        defaults=ClassDefaults(max_position_embeddings=32768, num_experts=60, num_experts_per_tok=4),
    ),
    ModelFamily(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        module="qwen3_moe",
        beyond_llama="small experts in most layers",
        windows=WindowTraits(default_tokens=4096, on_request=True),
        traits=ExpertTraits(
            experts_field="num_experts",
            width_field="moe_intermediate_size",
            query_key_norms=True,
        ),
        defaults=ClassDefaults(
            max_position_embeddings=32768, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8
        ),
    ),
    ModelFamily(
        model_type="deepseek_v2",
        architecture="DeepseekV2ForCausalLM",
        module="deepseek",
        models="V2, V2-Lite",
        beyond_llama="MLA, shared experts, softmax routing with and without groups",
        traits=LatentTraits(),
        defaults=ClassDefaults(
            vocab_size=102400,
            num_attention_heads=32,
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            n_routed_experts=64,
            n_shared_experts=2,
            moe_intermediate_size=1407,
            first_k_dense_replace=0,
        ),
    ),
    ModelFamily(
        model_type="deepseek_v3",
        architecture="DeepseekV3ForCausalLM",
        module="deepseek",
        aliases=("kimi_k2",),
        models="V3, R1, Kimi K2 in 16 bits",
        beyond_llama="MLA, sigmoid routing by groups with a bias for the choice",
        traits=LatentTraits(router_bias=True),
        defaults=ClassDefaults(
            max_position_embeddings=4096,
            vocab_size=129280,
            num_attention_heads=128,
            num_experts_per_tok=8,
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            n_routed_experts=256,
            n_shared_experts=1,
            moe_intermediate_size=2048,
            first_k_dense_replace=3,
            n_group=8,
            topk_group=4,
        ),
    ),
    ModelFamily(
        model_type="falcon",
        architecture="FalconForCausalLM",
        aliases=("RefinedWebModel", "RefinedWeb"),
        traits=FalconTraits(),
        defaults=ClassDefaults(rms_norm_eps=None, tie_word_embeddings=True),
    ),
    ModelFamily(
        model_type="gpt_neox",
        architecture="GPTNeoXForCausalLM",
        traits=GptNeoxTraits(),
        defaults=ClassDefaults(rms_norm_eps=None),
    ),
)

RUNNABLE = tuple(family for family in FAMILIES if family.module is not None)
WITH_VISION = {name: family for family in RUNNABLE for name in family.vision_architectures}
_BY_ARCHITECTURE = {family.architecture: family for family in FAMILIES}
_BY_MODEL_TYPE = {name: family for family in FAMILIES for name in (family.model_type, *family.aliases)}


def windows_of_architecture(architecture: str) -> WindowTraits | None:
    """The windows of the family with this architecture; None where it has none, or there is no such row."""
    family = _BY_ARCHITECTURE.get(architecture)
    return family.windows if family is not None else None


def family_of(model_type: str) -> ModelFamily | None:
    """The family of a config.json's `model_type`, by its name or an alias; None where there is no row."""
    return _BY_MODEL_TYPE.get(model_type)


def with_class_defaults(config: Mapping[str, object], family: ModelFamily) -> dict[str, object]:
    """Return the fields of `config`, with those of `ClassDefaults` that it leaves out.

    A `null` counts as left out, but for `NULL_IS_A_VALUE`. The number of experts has two names, of which
    `transformers` 5 writes the other one.
    """
    filled = dict(config)
    if family.defaults.num_experts is not None and filled.get("num_experts") is None:
        filled["num_experts"] = filled.get("num_local_experts")
    for field in fields(ClassDefaults):
        default = getattr(family.defaults, field.name)
        means_something = field.name in NULL_IS_A_VALUE and field.name in config
        if default is not None and filled.get(field.name) is None and not means_something:
            filled[field.name] = default
    return filled


def defaults_to_state(config: Mapping[str, object], family: ModelFamily) -> dict[str, int]:
    """Return the class defaults that an inspection of `config` states as numbers."""
    defaults = {name: getattr(family.defaults, name) for name in STATED_IN_INSPECTIONS if name not in config}
    return {name: default for name, default in defaults.items() if default is not None}
