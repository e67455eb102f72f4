"""The tensors of draft heads: their names in the files and here, and what is wrong with those of a folder. No torch.

    in the files                                     here
    fc.*, fusion_fc.*                                fc.*
    layers.N.*, transformer.*, midlayer.*            model.layers.N.*
    medusa_head.0.0.linear.*, 0.0.linear.*           0.0.linear.*

The runtime checks the same when it loads a head. An inspection says it before a pod exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

EAGLE1, EAGLE3, MEDUSA = "EAGLE-1", "EAGLE-3", "Medusa"
MEDUSA_PREFIX = "medusa_head."
EAGLE1_SHARED_WITH_TARGET = ("embed_tokens.weight", "lm_head.weight")
EAGLE3_NOT_READ = ("embed_tokens.weight", "t2d")
D2T = "d2t"  # of an EAGLE-3 head: read, and no weight
ROTARY_BUFFER = ".rotary_emb.inv_freq"  # transformers once stored it; it follows from config.json
EAGLE3_STATES = 3  # of the target, that such a head fuses

Shape = tuple[int, ...]
Expected = Iterator[tuple[str, tuple[int | None, ...]]]  # names here; None: a size that config.json does not say
_LAYER_0 = "model.layers.0."


def eagle1_name(name: str) -> str | None:
    """Return the name here; None where the tensor is not read."""
    if name in EAGLE1_SHARED_WITH_TARGET or name.endswith(ROTARY_BUFFER):
        return None
    for prefix, ours in (("fusion_fc.", "fc."), ("transformer.", _LAYER_0), ("layers.", "model.layers.")):
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return name


def eagle3_name(name: str) -> str | None:
    """Return the name here; None where the tensor is not read."""
    if name in EAGLE3_NOT_READ or name.endswith(ROTARY_BUFFER):
        return None
    for prefix in ("midlayer.", "layers.0."):
        if name.startswith(prefix):
            return _LAYER_0 + name.removeprefix(prefix)
    return name


def medusa_name(name: str) -> str:
    """Return the name here."""
    return name.removeprefix(MEDUSA_PREFIX)


def names_here(stored: Iterable[str], here_of: Callable[[str], str | None]) -> dict[str, str]:
    """Return names here, to those in the files. `here_of`: one name, None where the tensor is not read.

    A second tensor for one place keeps the name that it has in the file, which is no part of a head.
    """
    names: dict[str, str] = {}
    for name in sorted(stored, key=lambda name: here_of(name) != name):
        here = here_of(name)
        if here is not None:
            names[name if here in names else here] = name
    return names


def wrong_tensor(
    kind: str, config: Mapping[str, Any], layer: Mapping[str, Any], shapes: Mapping[str, Shape]
) -> str | None:
    """Return what is wrong with the first tensor that is missing, surplus or of another size; None: nothing.

    A size or a number of layers that config.json does not say, or says wrongly, makes no tensor wrong.

    Args:
        kind: EAGLE1, EAGLE3 or MEDUSA.
        config, layer: config.json, and its section with the fields of the head's layer.
        shapes: of every tensor, by its name in the files.
    """
    here_of, expected_of = _KINDS[kind]
    stored = names_here(shapes, here_of)
    wanted: dict[str, tuple[int | None, ...]] = {}
    for name, shape in expected_of(config, layer, stored):  # lazily: a config.json may claim a billion layers
        if name not in stored:
            return f"tensor {_name_in_files(kind, name, shapes):.200} is missing"
        wanted[name] = shape
    if not wanted:
        return None
    if surplus := sorted(stored[name] for name in {*stored} - {*wanted}):
        others = f", nor are {len(surplus) - 1} others" if len(surplus) > 1 else ""
        return f"tensor {surplus[0]:.200} is no part of such a head{others}"
    for name, shape in wanted.items():
        found = shapes[stored[name]]
        if len(found) != len(shape) or any(size not in (None, one) for size, one in zip(shape, found, strict=True)):
            sizes = ["?" if size is None else size for size in shape]
            return f"tensor {stored[name]:.200} is {_sizes(found)}, and config.json makes it {_sizes(sizes)}"
    return None


def _eagle1(_config: Mapping[str, Any], layer: Mapping[str, Any], stored: Mapping[str, str]) -> Expected:
    layers, hidden = _size(layer, "num_hidden_layers"), _size(layer, "hidden_size")
    if layers is None:
        return
    yield "fc.weight", (hidden, _times(2, hidden))
    if "fc.bias" in stored:
        yield "fc.bias", (hidden,)
    for number in range(layers):
        if number:
            yield f"model.layers.{number}.input_layernorm.weight", (hidden,)
        yield from _decoder_layer(f"model.layers.{number}", layer, hidden)


def _eagle3(config: Mapping[str, Any], layer: Mapping[str, Any], stored: Mapping[str, str]) -> Expected:
    hidden, vocabulary = _size(layer, "hidden_size"), _size(layer, "vocab_size")
    drafted = _size(config, "draft_vocab_size", vocabulary)
    yield "fc.weight", (hidden, _times(EAGLE3_STATES, hidden))
    for name in (f"{_LAYER_0}input_layernorm", f"{_LAYER_0}hidden_norm", "norm"):
        yield f"{name}.weight", (hidden,)
    yield from _decoder_layer(_LAYER_0.rstrip("."), layer, _times(2, hidden))
    yield "lm_head.weight", (drafted, hidden)
    if D2T in stored or (drafted is not None and vocabulary is not None and drafted < vocabulary):
        yield D2T, (drafted,)


def _medusa(config: Mapping[str, Any], _layer: Mapping[str, Any], _stored: Mapping[str, str]) -> Expected:
    heads, blocks = _size(config, "medusa_num_heads"), _size(config, "medusa_num_layers", 1)
    hidden = _size(config, "hidden_size")
    if heads is None or blocks is None:
        return
    for head in range(heads):
        for block in range(blocks):
            yield f"{head}.{block}.linear.weight", (hidden, hidden)
            yield f"{head}.{block}.linear.bias", (hidden,)
        yield f"{head}.{blocks}.weight", (_size(config, "vocab_size"), hidden)


def _decoder_layer(name: str, layer: Mapping[str, Any], attention_inputs: int | None) -> Expected:
    """One layer of a Llama, but the norm in front of it."""
    hidden, inner, heads = (_size(layer, one) for one in ("hidden_size", "intermediate_size", "num_attention_heads"))
    head_dim = _size(layer, "head_dim", hidden // heads if hidden and heads else None)
    query, kv = _times(head_dim, heads), _times(head_dim, _size(layer, "num_key_value_heads", heads))
    output_bias, mlp_bias = (layer.get(one) is True for one in ("attention_bias", "mlp_bias"))
    input_bias = output_bias or layer.get("qkv_bias") is True
    yield f"{name}.post_attention_layernorm.weight", (hidden,)
    for linear, outputs, inputs, bias in (
        ("self_attn.q_proj", query, attention_inputs, input_bias),
        ("self_attn.k_proj", kv, attention_inputs, input_bias),
        ("self_attn.v_proj", kv, attention_inputs, input_bias),
        ("self_attn.o_proj", hidden, query, output_bias),
        ("mlp.gate_proj", inner, hidden, mlp_bias),
        ("mlp.up_proj", inner, hidden, mlp_bias),
        ("mlp.down_proj", hidden, inner, mlp_bias),
    ):
        yield f"{name}.{linear}.weight", (outputs, inputs)
        if bias:
            yield f"{name}.{linear}.bias", (outputs,)


def _name_in_files(kind: str, name: str, stored: Iterable[str]) -> str:
    """The name that a missing tensor has in the layout of the others."""
    if kind == MEDUSA:
        return MEDUSA_PREFIX + name if any(one.startswith(MEDUSA_PREFIX) for one in stored) else name
    if kind == EAGLE3:
        layer = "layers.0." if any(one.startswith("layers.0.") for one in stored) else "midlayer."
        return name.replace(_LAYER_0, layer)
    if any(one.startswith(("transformer.", "fusion_fc.")) for one in stored):
        name = f"fusion_{name}" if name.startswith("fc.") else name.replace(_LAYER_0, "transformer.")
    return name.removeprefix("model.")


def _size(values: Mapping[str, Any], name: str, default: int | None = None) -> int | None:
    """A field; None where it is no size."""
    found = values.get(name)
    if found is None:
        return default
    return found if type(found) is int and found > 0 else None


def _times(first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else first * second


def _sizes(shape: Iterable[object]) -> str:
    return f"[{', '.join(map(str, shape))}]"


_KINDS: dict[str, tuple[Callable[[str], str | None], Callable[..., Expected]]] = {
    EAGLE1: (eagle1_name, _eagle1),
    EAGLE3: (eagle3_name, _eagle3),
    MEDUSA: (medusa_name, _medusa),
}
