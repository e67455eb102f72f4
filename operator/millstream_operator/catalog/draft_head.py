"""Read an inspection of a draft head: its shape, with the weights that its files hold.

The runtime's `draft_heads.describe_head` wrote the answer, from the names of the tensors and the fields of config.json.
A head's weights are counted in the headers of its files, so the shape has exact bytes and no parts: all in `mlp`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millstream_operator.catalog.config_fields import ConfigError, ConfigFields, UnsupportedModelError
from millstream_operator.catalog.model_shape import DraftHead, ModelShape, Parameters
from millstream_runtime.draft_head_tensors import EAGLE1, EAGLE3, MEDUSA
from millstream_runtime.draft_heads import LAYER_IDS

METHODS = {EAGLE1: "EAGLE", EAGLE3: "EAGLE", MEDUSA: "Medusa"}  # of the API
_NAMES = {EAGLE1: "an EAGLE-1 head", EAGLE3: "an EAGLE-3 head", MEDUSA: "Medusa heads"}
_TENSORS = {"EAGLE": "fc.weight or fusion_fc.weight", "Medusa": "0.0.linear.weight"}
EAGLE3_STATES = 3
DEFAULT_POSITIONS = 2048
_LARGEST_ELEMENTS = 1 << 40
_FIX = "name the folder of a head that was trained with the model"


def refuse_head(answer: Mapping[str, Any]) -> None:
    """Raise ConfigError where the source of a model holds a draft head."""
    if (kind := _kind(answer)) is not None:
        raise ConfigError(
            f"The weights are those of {_NAMES[kind]}, not of a model: name a model, or set speculation.method to "
            f"{METHODS[kind]} and name the head as speculation.draftModel."
        )


def read_head(answer: Mapping[str, Any], method: str) -> ModelShape:
    """Return the shape of the head in an answer, for a method of the API.

    Raises:
        ConfigError: it holds no head of this method, a tensor is missing, surplus or of another size, or a field is out
            of range; UnsupportedModelError: a head that no runtime of this version serves.
    """
    kind = _kind(answer)
    if kind is None:
        raise ConfigError(
            f"speculation.method is {method}, but the weights are those of no {method} head, which has the tensor "
            f"{_TENSORS[method]}: {_FIX}, or set speculation.method to DraftModel for a draft model."
        )
    if METHODS[kind] != method:
        raise ConfigError(
            f"speculation.method is {method}, but the weights are those of {_NAMES[kind]}: {_FIX}, or set "
            f"speculation.method to {METHODS[kind]}."
        )
    head = answer["draft_head"]
    if (refused := head.get("unsupported")) is not None:
        raise UnsupportedModelError(
            f"config.json: {str(refused)[:100]} is not supported by this version for {_NAMES[kind]}: name another one "
            "(docs/speculation.md has what is served)."
        )
    if (wrong := head.get("wrong")) is not None:
        raise ConfigError(
            f"The files are not those of {_NAMES[kind]} as config.json describes it: {str(wrong)[:300]}. Fetch them "
            f"again, or {_FIX}."
        )
    elements, config = head.get("elements"), head.get("config")
    if not isinstance(elements, int) or not 0 < elements < _LARGEST_ELEMENTS or not isinstance(config, Mapping):
        raise ConfigError(f"The weights of {_NAMES[kind]} cannot be counted; use an image of the operator's version.")
    fields = ConfigFields(config)
    return _medusa(fields, elements) if kind == MEDUSA else _eagle(fields, elements, kind)


def _kind(answer: Mapping[str, Any]) -> str | None:
    head = answer.get("draft_head")
    kind = head.get("kind") if isinstance(head, Mapping) else None
    return kind if isinstance(kind, str) and kind in METHODS else None


def _eagle(fields: ConfigFields, elements: int, kind: str) -> ModelShape:
    hidden, vocabulary = fields.integer("hidden_size"), fields.integer("vocab_size")
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.contradiction(f"num_key_value_heads is {kv_heads}; it must divide num_attention_heads ({heads})")
    if kind == EAGLE3 and (drafted := fields.integer("draft_vocab_size", vocabulary)) > vocabulary:
        raise fields.contradiction(f"draft_vocab_size is {drafted}; it must be at most vocab_size ({vocabulary})")
    return _shape(
        DraftHead(
            kind=kind,
            vocab_size=vocabulary,
            target_hidden_size=fields.integer("target_hidden_size", hidden) if kind == EAGLE3 else hidden,
            states=EAGLE3_STATES if kind == EAGLE3 else 1,
            state_layers=_state_layers(fields) if kind == EAGLE3 else None,
            uses_target_head=kind == EAGLE1,
        ),
        elements,
        hidden_size=hidden,
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=fields.integer("head_dim", max(1, hidden // heads)),
        intermediate_sizes=(fields.integer("intermediate_size"),),
        max_position_embeddings=fields.integer("max_position_embeddings", DEFAULT_POSITIONS),
    )


def _state_layers(fields: ConfigFields) -> tuple[int, ...] | None:
    found = fields.values.get(LAYER_IDS)
    if found is None:
        return None
    if not isinstance(found, list) or len(found) != EAGLE3_STATES:
        raise fields.contradiction(f"{LAYER_IDS} must be a list of {EAGLE3_STATES} numbers of layers")
    return tuple(fields.checked(LAYER_IDS, layer) for layer in found)


def _medusa(fields: ConfigFields, elements: int) -> ModelShape:
    """Without keys: each head computes on one hidden state."""
    hidden, count = fields.integer("hidden_size"), fields.integer("medusa_num_heads")
    fields.integer("medusa_num_layers", 1)
    vocabulary = fields.integer("vocab_size")
    return _shape(
        DraftHead(kind=MEDUSA, vocab_size=vocabulary, target_hidden_size=hidden, drafts_per_pass=count, has_keys=False),
        elements,
        hidden_size=hidden,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_size=hidden,
        intermediate_sizes=(hidden,),
        max_position_embeddings=DEFAULT_POSITIONS,
    )


def _shape(head: DraftHead, elements: int, **sizes: Any) -> ModelShape:
    """`vocab_size` 0: the embedding is the target's, and the head's own output head is counted in `elements`."""
    parts = dict.fromkeys(("embedding", "attention", "experts", "routers", "norms", "head"), 0)
    parameters = Parameters(mlp=elements, **parts)
    return ModelShape(
        family=METHODS[head.kind], architecture=head.kind, vocab_size=0, parameters=parameters, draft_head=head, **sizes
    )
