"""How many weights a quantised checkpoint keeps in 16 bit: its list of modules, against the modules of the decoder.

    "lm_head"                        outside of the layers: embeddings and head are always counted in 16 bit
    "model.layers.0.mlp.down_proj"   one projection of one layer
    "self_attn", "re:.*self_attn.*"  all projections of all layers
    "model.layers.*.mlp": 12         of twelve layers (a long list, as `millstream inspect` shortens it)

A pattern is never run as a regular expression: the file is untrusted, and a pattern can take years. What is more than
literals, `.*`, `\\d+` and `(a|b)` is refused. Layers count alike, so the first dense layers of a mixture of experts are
counted as an average.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product

from millstream_operator.catalog.checkpoint_quantization import INSTEAD, Pattern
from millstream_operator.catalog.config_fields import UnsupportedModelError
from millstream_operator.catalog.model_shape import ModelShape

MAX_PATTERNS, MAX_PATTERN_LENGTH, MAX_ALTERNATIVES = 4096, 200, 64
EVERYTHING = ("Linear", "*")
_PREFIXES = ("model.", "language_model.model.", "model.language_model.")  # the latter beside a vision tower
_GROUP = re.compile(r"\((?:\?:)?([A-Za-z0-9_.|]*)\)")
_LAYER = re.compile(r"(?:layers|h|blocks)\.([0-9]+)(?:\.|$)")
# Words of modules inside the decoder's layers. A name without one of them is outside: a head, a vision tower.
_INSIDE = re.compile(r"layers\.|(?:^|[.*])h\.|attn|attention|mlp|experts|_proj(?![a-z])|feed_forward|block_sparse_moe")
_OUTSIDE = re.compile(r"visual|vision|audio|speech|tower|projector|encoder\.")
# Inside the layers, and counted in 16 bit in any case.
_ALWAYS_16_BIT = re.compile(r"norm[^.]*$|(?:^|[.*])(?:gate|router|shared_expert_gate|shared_head|eh_proj)(?:\.|\*|$)")


@dataclass(frozen=True, slots=True)
class _Module:
    """`names`: how checkpoints call it below `layers.N.`; `parameters` of all layers together."""

    names: tuple[str, ...]
    parameters: int


def unquantized_parameters(shape: ModelShape, kept: Sequence[Pattern], targets: Sequence[Pattern] = ()) -> int:
    """Return how many of `shape.parameters.linear` are not quantised. `targets`: what is; empty: everything.

    Raises:
        UnsupportedModelError: a pattern that is not read here.
    """
    modules = list(_modules(shape))
    layers_kept = _layers_named(kept, modules, shape)
    layers_targeted = _layers_named([one for one in targets if one[0] not in EVERYTHING], modules, shape)
    all_targeted = not targets or any(name in EVERYTHING for name, _ in targets)
    total = 0
    for number, module in enumerate(modules):
        everywhere = set(range(shape.num_layers))
        quantized = everywhere if all_targeted else layers_targeted[number]
        total += module.parameters * len((everywhere - quantized) | layers_kept[number]) // shape.num_layers
    return total


def _modules(shape: ModelShape) -> Iterator[_Module]:
    p, kv, down = shape.parameters, shape.kv_projection_parameters, shape.replicated_attention_parameters
    attention = ("self_attn.{}", "attention.{}", "self_attention.{}", "attn.{}")

    def of_attention(name: str, fused: str, parameters: int) -> _Module:
        names = tuple(form.format(one) for form in attention for one in (name, fused) if one)
        return _Module(names, parameters)

    if shape.latent_kv_elements is not None:
        for name in ("q_a_proj", "kv_a_proj_with_mqa"):
            yield of_attention(name, "", down // 2)
        for name in ("q_b_proj", "kv_b_proj", "o_proj"):
            yield of_attention(name, "q_proj" if name == "q_b_proj" else "", (p.attention - down) // 3)
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
            if glob not in EVERYTHING and not _is_linear(glob):
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
    for prefix, name in product(_PREFIXES, module.names):
        whole = f"{prefix}layers.0.{name}"
        if fnmatchcase(whole, wanted) or fnmatchcase(f".{whole}.", f"*.{wanted}.*"):
            return True
    return False


def _layers(glob: str, count: int | None, shape: ModelShape) -> set[int]:
    if (match := _LAYER.search(glob)) is not None:
        return {int(match[1])} & set(range(shape.num_layers))
    if count is None or "layers.*" not in glob:
        return set(range(shape.num_layers))
    each = shape.num_experts if ".experts.*" in glob and shape.num_experts else 1
    return set(range(min(shape.num_layers, -(-count // each))))


def _globs(text: str) -> list[str]:
    """A pattern as shell patterns.

    Raises:
        UnsupportedModelError: it is a regular expression of another form.
    """
    if len(text) > MAX_PATTERN_LENGTH:
        raise _unreadable(text)
    if not text.startswith("re:"):
        return [text]
    regex = text.removeprefix("re:").removeprefix("^")
    ends, regex = regex.endswith("$"), regex.removesuffix("$")
    regex = regex.replace(r"\d+", "*").replace("[0-9]+", "*").replace(r"\.", ".").replace(".*", "*")
    if _alternatives(regex) > MAX_ALTERNATIVES:
        raise _unreadable(text)
    found = _expanded(regex)
    if not all(re.fullmatch(r"[A-Za-z0-9_.*]*", one) for one in found):
        raise _unreadable(text)
    return [re.sub(r"\*+", "*", one if ends else f"{one}*") for one in found]


def _alternatives(regex: str) -> int:
    return math.prod(len(group.split("|")) for group in _GROUP.findall(regex))


def _expanded(regex: str) -> list[str]:
    """`a(b|c)` -> `ab`, `ac`."""
    if (group := _GROUP.search(regex)) is None:
        return [regex]
    before, after = regex[: group.start()], regex[group.end() :]
    return [one for choice in group[1].split("|") for one in _expanded(f"{before}{choice}{after}")]


def _unreadable(text: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"quantization_config names {text[:80]!r}, a pattern that the planner does not read; {INSTEAD}."
    )
