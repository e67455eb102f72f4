"""Which tensors make a draft head, and what a planner must know of one: config.json and headers alone. No torch.

    tensors                                              kind      served as
    fc.*, layers.0.* or fusion_fc.*, transformer.*       EAGLE-1   `models/eagle/eagle_folder.py`
    fc.* with midlayer.*, a hidden_norm or d2t           EAGLE-3   `models/eagle/eagle3_folder.py`
    0.0.linear.* or medusa_head.0.0.linear.*             Medusa    `models/medusa/medusa_heads.py`

A head's config.json is often that of a whole model (`architectures: LlamaForCausalLM`), so the names of the tensors
decide. The runtime checks every field when it loads a head; here is what decides sizes, and whether all tensors fit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from millstream_runtime.draft_head_tensors import (
    D2T,
    EAGLE1,
    EAGLE1_SHARED_WITH_TARGET,
    EAGLE3,
    EAGLE3_NOT_READ,
    MEDUSA,
    MEDUSA_PREFIX,
    ROTARY_BUFFER,
    wrong_tensor,
)

# Fields of config.json that make another head of it than one that is served, unless they are false or absent.
EAGLE1_OTHER_HEADS = ("layernorms", "add_para_norm", "use_aux_hidden_state", "eagle_aux_hidden_state_layer_ids")
EAGLE3_OTHER_HEADS = ("norm_before_fc", "fc_norm", "norm_output", "parallel_drafting")
LAYER_SECTION = "transformer_layer_config"  # where `speculators` keeps the fields of the head's layer
LAYER_IDS_SECTION, LAYER_IDS = "eagle_config", "eagle_aux_hidden_state_layer_ids"

_LAYER_FIELDS = (
    *("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "max_position_embeddings"),
)
_HEAD_FIELDS = ("draft_vocab_size", "target_hidden_size", "medusa_num_heads", "medusa_num_layers")
_MAX_LAYER_IDS = 8  # more are no head's, and the answer of an inspection is short
_LAYER = ("layers.", "transformer.", "midlayer.")
_FUSION = ("fc.weight", "fusion_fc.weight", "fc.bias", "fusion_fc.bias")  # a head may lack one of them, as any tensor
_MEDUSA_BLOCK = re.compile(r"\d{1,4}\.\d{1,4}\.linear\.weight")


def head_kind(config: Mapping[str, Any], names: Collection[str]) -> str | None:
    """Return the kind of the head that these tensors are; None where they are no head's."""
    if any(_MEDUSA_BLOCK.fullmatch(name.removeprefix(MEDUSA_PREFIX)) for name in names):
        return MEDUSA
    is_named = config.get("speculators_model_type") is not None or any(name.startswith("midlayer.") for name in names)
    if not any(name.startswith(_LAYER) for name in names) or not (is_named or any(name in names for name in _FUSION)):
        return None
    return EAGLE3 if is_eagle3(config, names) else EAGLE1


def is_eagle3(config: Mapping[str, Any], names: Iterable[str]) -> bool:
    """By what config.json says, or by a tensor that no EAGLE-1 head has."""
    if (kind := config.get("speculators_model_type")) is not None:
        return bool(kind == "eagle3")
    architectures = config.get("architectures")
    if isinstance(architectures, list) and any("eagle3" in str(one).lower() for one in architectures):
        return True
    return any(name == D2T or name.startswith("midlayer.") or name.endswith(".hidden_norm.weight") for name in names)


def describe_head(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any] | None:
    """Return what an inspection says of a head; None where the tensors are no head's.

        {"kind": "EAGLE-1", "elements": 475904,   weights that the runtime loads, of all tensors that it reads
         "unsupported": null,                     or the field, with its value, for which it loads none
         "config": {"hidden_size": 256, …},       sizes, as the file has them, unchecked
         "wrong": "tensor fc.weight is missing"}  absent where all tensors are there, and none that is no head's

    Args:
        config: config.json.
        shapes: of every tensor, by its name in the files.
    """
    kind = head_kind(config, shapes)
    if kind is None:
        return None
    section = config.get(LAYER_SECTION)
    layer = section if isinstance(section, Mapping) and section else config
    found = {name: layer[name] for name in _LAYER_FIELDS if name in layer}
    found |= {name: config[name] for name in _HEAD_FIELDS if name in config}
    if kind == EAGLE3 and (ids := _layer_ids(config)) is not None:
        found[LAYER_IDS] = ids
    if kind == MEDUSA:
        found = _medusa_sizes(found, shapes)
    unsupported = _unsupported(kind, config, layer)
    sizes = {**config, **found} if kind == MEDUSA else config
    wrong = None if unsupported else wrong_tensor(kind, sizes, layer, shapes)
    return {
        "kind": kind,
        "elements": sum(math.prod(shape) for name, shape in shapes.items() if _is_weight(kind, name)),
        "unsupported": unsupported,
        "config": found,
        **({"wrong": wrong} if wrong else {}),
    }


def _is_weight(kind: str, name: str) -> bool:
    """Whether the runtime loads the tensor as a weight."""
    left_out = {EAGLE1: EAGLE1_SHARED_WITH_TARGET, EAGLE3: (*EAGLE3_NOT_READ, D2T)}.get(kind, ())
    return name not in left_out and not name.endswith(ROTARY_BUFFER)


def _layer_ids(config: Mapping[str, Any]) -> Any:
    section = config.get(LAYER_IDS_SECTION)
    found = config.get(LAYER_IDS)
    if found is None and isinstance(section, Mapping):
        found = section.get(LAYER_IDS)
    return found[:_MAX_LAYER_IDS] if isinstance(found, list) else found


def _medusa_sizes(found: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The same with the sizes that config.json may leave out and the tensors of head 0 say."""
    here = {name.removeprefix(MEDUSA_PREFIX): shape for name, shape in shapes.items()}
    blocks = found.get("medusa_num_layers")
    output = here.get(f"0.{1 if blocks is None else blocks}.weight")
    sizes = {"hidden_size": here.get("0.0.linear.weight"), "vocab_size": output}
    for name, shape in sizes.items():
        if found.get(name) is None and shape:
            found[name] = shape[0]
    return found


def _unsupported(kind: str, config: Mapping[str, Any], layer: Mapping[str, Any]) -> str | None:
    """The first field for which the runtime refuses such a head."""
    served = {EAGLE1: ("eagle", None), EAGLE3: ("eagle3", None), MEDUSA: (None,)}[kind]
    if (named := config.get("speculators_model_type")) not in served:
        return f"speculators_model_type {named!r:.60}"
    for name in {EAGLE1: EAGLE1_OTHER_HEADS, EAGLE3: EAGLE3_OTHER_HEADS}.get(kind, ()):
        if config.get(name):
            return f"{name} {config[name]!r:.60}"
    if any(values.get("quantization_config") for values in (config, layer)):
        return "quantization_config"
    if kind == EAGLE3 and layer.get("num_hidden_layers") not in (None, 1):
        return f"num_hidden_layers {layer['num_hidden_layers']!r:.60}"
    return None
