"""How many weights a quantised checkpoint keeps in 16 bit: its list of modules, against the modules of the decoder.

    "lm_head"                        outside of the layers: embeddings and head are always counted in 16 bit
    "model.layers.0.mlp.down_proj"   one projection of one layer
    "self_attn", "re:.*self_attn.*"  all projections of all layers
    "model.layers.*.mlp": 12         of twelve layers (a long list, as `millstream inspect` shortens it)

Patterns are read and matched as the runtime does it (`quantization_config/module_patterns.py`). Layers count alike, so
the first dense layers of a mixture of experts are counted as an average.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from millstream_operator.catalog.checkpoint_quantization import INSTEAD, Pattern
from millstream_operator.catalog.config_fields import UnsupportedModelError
from millstream_operator.catalog.model_shape import ModelShape
from millstream_runtime.quantization_config.module_patterns import EVERYTHING, MAX_PATTERNS, globs_of, matches

_LAYER = re.compile(r"(?:layers|h|blocks)\.([0-9]+)(\.|\*|$)")  # a star: all layers whose number begins so
# Words of modules inside the decoder's layers. A name without one of them is outside: a head, a vision tower.
_INSIDE = re.compile(r"layers\.|(?:^|[.*])h\.|attn|attention|mlp|experts|_proj(?![a-z])|feed_forward|block_sparse_moe")
_OUTSIDE = re.compile(r"visual|vision|audio|speech|tower|projector|encoder\.")
# Inside the layers, and counted in 16 bit in any case.
_ALWAYS_16_BIT = re.compile(
    r"norm[^.]*(?:\.\*?)?$|(?:^|[.*])(?:gate|router|shared_expert_gate|shared_head|eh_proj)(?:\.|\*|$)"
)


@dataclass(frozen=True, slots=True)
class _Module:
    """`names`: how checkpoints call it below `layers.N.`; `parameters` of all layers together."""

    names: tuple[str, ...]
    parameters: int
    is_latent_up: bool = False  # MLA's `kv_b_proj`


def unquantized_parameters(shape: ModelShape, kept: Sequence[Pattern], targets: Sequence[Pattern] = ()) -> int:
    """Return how many of `shape.parameters.linear` are not quantised. `targets`: what is; empty: everything.

    Raises:
        UnsupportedModelError: a pattern that is not read here.
    """
    return sum(number for _, number in _unquantized(shape, kept, targets))


def dequantized_parameters(shape: ModelShape, kept: Sequence[Pattern], targets: Sequence[Pattern] = ()) -> int:
    """Return how many quantised weights the runtime dequantises once: those of MLA's `kv_b_proj`."""
    latent = [(one, number) for one, number in _unquantized(shape, kept, targets) if one.is_latent_up]
    return sum(module.parameters - number for module, number in latent)


def _unquantized(
    shape: ModelShape, kept: Sequence[Pattern], targets: Sequence[Pattern]
) -> Iterator[tuple[_Module, int]]:
    """Each module, and how many of its weights are not quantised."""
    modules = list(_modules(shape))
    layers_kept = _layers_named(kept, modules, shape)
    layers_targeted = _layers_named([one for one in targets if one[0] not in EVERYTHING], modules, shape)
    all_targeted = not targets or any(name in EVERYTHING for name, _ in targets)
    for number, module in enumerate(modules):
        everywhere = set(range(shape.num_layers))
        quantized = everywhere if all_targeted else layers_targeted[number]
        yield module, module.parameters * len((everywhere - quantized) | layers_kept[number]) // shape.num_layers


def _modules(shape: ModelShape) -> Iterator[_Module]:
    p, kv, down = shape.parameters, shape.kv_projection_parameters, shape.replicated_attention_parameters
    attention = ("self_attn.{}", "attention.{}", "self_attention.{}", "attn.{}")

    def of_attention(name: str, fused: str, parameters: int) -> _Module:
        names = tuple(form.format(one) for form in attention for one in (name, fused) if one)
        return _Module(names, parameters)

    if shape.latent_kv_elements is not None:
        for name in ("q_a_proj", "kv_a_proj_with_mqa"):
            yield of_attention(name, "", down // 2)
        rest = (p.attention - down - shape.latent_up_parameters) // 2
        yield of_attention("q_b_proj", "q_proj", rest)
        yield of_attention("o_proj", "", rest)
        yield _Module(of_attention("kv_b_proj", "", 0).names, shape.latent_up_parameters, is_latent_up=True)
    else:
        rest = (p.attention - kv) // 2
        yield of_attention("q_proj", "qkv_proj", rest)
        yield of_attention("k_proj", "qkv_proj", kv // 2)
        yield of_attention("v_proj", "qkv_proj", kv // 2)
        yield of_attention("o_proj", "dense", rest)
    for name, mixtral, fused in (("gate_proj", "w1", "gate_up_proj"), ("up_proj", "w3", "gate_up_proj"),
                                 ("down_proj", "w2", "down_proj")):  # fmt: skip
        dense = tuple(f"mlp.{part}{one}" for part in ("", "shared_expert.", "shared_experts.") for one in (name, fused))
        yield _Module(dense, p.mlp // 3)
        if p.experts:
            experts = (f"mlp.experts.0.{name}", f"block_sparse_moe.experts.0.{mixtral}", f"mlp.experts.{fused}")
            yield _Module(experts, p.experts // 3)


def _layers_named(patterns: Sequence[Pattern], modules: Sequence[_Module], shape: ModelShape) -> list[set[int]]:
    """For each module, the layers in which one of the patterns names it."""
    if len(patterns) > MAX_PATTERNS:
        raise UnsupportedModelError(
            f"quantization_config names {len(patterns)} modules; at most {MAX_PATTERNS} are read."
        )
    found: list[set[int]] = [set() for _ in modules]
    known: dict[str, list[int]] = {}
    for text, count in patterns:
        for glob in _globs(text):
            if glob != "*" and not _is_linear(glob):
                continue
            layers = _layers(glob, count, shape)
            generic = _LAYER.sub(lambda match: match[0].replace(match[1], "0", 1), glob)
            if generic not in known:
                known[generic] = [number for number, module in enumerate(modules) if _names(generic, module)]
            named = known[generic]
            if not named:
                raise UnsupportedModelError(
                    f"quantization_config names {text[:80]!r}, which is no module of a {shape.family} that the planner "
                    f"knows; {INSTEAD}."
                )
            for number in named:
                found[number] |= layers
    return found


def _is_linear(glob: str) -> bool:
    """Whether a pattern may mean linear layers of the decoder."""
    inside = _INSIDE.search(glob) and not _OUTSIDE.search(glob)
    return bool(inside) and not _ALWAYS_16_BIT.search(glob)


def _names(glob: str, module: _Module) -> bool:
    """Whether a pattern means this module: by its whole name, by a part of it, or by what contains it."""
    wanted = re.sub(r"\.experts\.[0-9]+", ".experts.0", glob)
    return any(matches(f"model.layers.0.{name}", wanted) for name in module.names)


def _layers(glob: str, count: int | None, shape: ModelShape) -> set[int]:
    if (match := _LAYER.search(glob)) is not None:
        number, is_beginning = match[1], match[2] == "*"
        return {layer for layer in range(shape.num_layers) if _is_layer(str(layer), number, is_beginning)}
    if count is None or "layers.*." not in glob:
        return set(range(shape.num_layers))
    each = shape.num_experts if ".experts.*" in glob and shape.num_experts else 1
    return set(range(min(shape.num_layers, -(-count // each))))


def _is_layer(layer: str, number: str, is_beginning: bool) -> bool:
    return layer.startswith(number) if is_beginning else layer == number


def _globs(text: str) -> tuple[str, ...]:
    """A pattern as globs.

    Raises:
        UnsupportedModelError: it is a regular expression of another form.
    """
    found = globs_of(text)
    if found is None:
        raise UnsupportedModelError(
            f"quantization_config names {text[:80]!r}, a pattern that the planner does not read; {INSTEAD}."
        )
    return found
