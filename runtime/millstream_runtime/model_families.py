"""Every model family, one row per `model_type` of Hugging Face. The runtime, the planner and the docs derive from it.

    config.CAPABILITIES.model_families        rows with a module
    models/registry.py                        architecture -> the row's module of models/families/
    millstream_operator/catalog/families/     model_type -> parameter counts, from the row's traits
    docs/engine.md                            the table of families (`make crds`)

It imports nothing but the standard library, because the operator reads it too. CONTRIBUTING.md has the recipe for
adding a family.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseTraits:
    """How a dense decoder differs from Llama. Optional sizes are the defaults of `transformers` for absent fields."""

    qkv_bias: bool = False
    norms_per_layer: int = 2
    query_key_norms: bool = False
    tied: bool = False  # the head shares the embedding's weights
    heads: int | None = None
    kv_heads: int | None = None
    head_size: int | None = None
    vocab_size: int | None = None
    max_position_embeddings: int = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTraits:
    """How a mixture of experts over ordinary attention names and counts its experts in config.json."""

    experts_field: str
    width_field: str
    default_experts: int
    default_experts_per_token: int
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

    @property
    def in_every_layer(self) -> bool:
        """Whether all layers are windowed, whatever `layer_types` says."""
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
        traits=DenseTraits(max_position_embeddings=2048),
    ),
    ModelFamily(
        model_type="mistral",
        architecture="MistralForCausalLM",
        vision_architectures=("Mistral3ForConditionalGeneration",),
        module="mistral",
        beyond_llama="a sliding window in every layer",
        windows=WindowTraits(default_tokens=4096),  # version 0.1 had no field for it; later ones say null
        traits=DenseTraits(max_position_embeddings=131072),
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
        traits=DenseTraits(qkv_bias=True, max_position_embeddings=32768),
    ),
    ModelFamily(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        vision_architectures=("Qwen3VLForConditionalGeneration",),
        module="qwen3",
        aliases=("qwen3_vl_text",),
        beyond_llama="RMS norm on query and key heads",
        windows=WindowTraits(default_tokens=4096, on_request=True, first_full_layers=28),
        traits=DenseTraits(query_key_norms=True, head_size=128, max_position_embeddings=32768),
    ),
    ModelFamily(
        model_type="gemma",
        architecture="GemmaForCausalLM",
        traits=DenseTraits(tied=True, head_size=256, max_position_embeddings=8192),
    ),
    ModelFamily(
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        module="gemma",
        beyond_llama="norms before and after each block, scaled embeddings, soft caps, alternating windows",
        windows=WindowTraits(default_tokens=4096, full_every=2),
        traits=DenseTraits(norms_per_layer=4, tied=True, head_size=256, max_position_embeddings=8192),
    ),
    ModelFamily(
        model_type="gemma3",
        architecture="Gemma3ForCausalLM",
        vision_architectures=("Gemma3ForConditionalGeneration",),
        module="gemma",
        aliases=("gemma3_text",),
        beyond_llama="Q/K norm, a rotary base of its own for windowed layers",
        windows=WindowTraits(default_tokens=4096, full_every=6, pattern_is_read=True),
        traits=DenseTraits(
            norms_per_layer=4,
            query_key_norms=True,
            tied=True,
            heads=8,
            kv_heads=4,
            head_size=256,
            vocab_size=262208,
            max_position_embeddings=131072,
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
            default_experts=8,
            default_experts_per_token=2,
            every_layer=True,
        ),
    ),
    ModelFamily(
        model_type="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        traits=ExpertTraits(
            experts_field="num_experts",
            width_field="moe_intermediate_size",
            default_experts=60,
            default_experts_per_token=4,
            qkv_bias=True,
            shared_expert=True,
        ),
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
            default_experts=128,
            default_experts_per_token=8,
            query_key_norms=True,
        ),
    ),
    ModelFamily(
        model_type="deepseek_v2",
        architecture="DeepseekV2ForCausalLM",
        module="deepseek",
        models="V2, V2-Lite",
        beyond_llama="MLA, shared experts, softmax routing with and without groups",
        traits=LatentTraits(),
    ),
    ModelFamily(
        model_type="deepseek_v3",
        architecture="DeepseekV3ForCausalLM",
        module="deepseek",
        aliases=("kimi_k2",),
        models="V3, R1, Kimi K2 in 16 bits",
        beyond_llama="MLA, sigmoid routing by groups with a bias for the choice",
        traits=LatentTraits(router_bias=True),
    ),
    ModelFamily(
        model_type="falcon",
        architecture="FalconForCausalLM",
        aliases=("RefinedWebModel", "RefinedWeb"),
        traits=FalconTraits(),
    ),
    ModelFamily(model_type="gpt_neox", architecture="GPTNeoXForCausalLM", traits=GptNeoxTraits()),
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
