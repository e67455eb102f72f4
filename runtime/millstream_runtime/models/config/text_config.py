"""The fields of the language model in the config.json of a model with a vision tower."""

from __future__ import annotations

from collections.abc import Mapping

from millstream_runtime.context_limit import MROPE
from millstream_runtime.model_families import ModelFamily
from millstream_runtime.models.config.fields import Fields

# What the whole model says counts, and not the defaults that `transformers` writes for its language model.
ROPE_FIELDS = ("rope_parameters", "rope_scaling")
OUTER_FIRST = ("eos_token_id", "tie_word_embeddings", "quantization_config")


def language_model_fields(fields: Fields, family: ModelFamily) -> Fields:
    """Return the fields of `text_config` over those around it, as those of a model of `family`.

    Older folders of Qwen's have no such object: there the fields around are those of the language model.

    Raises:
        RuntimeFailure: CheckpointInvalid, there is no `text_config`; UnsupportedByRuntime, it is another family's.
    """
    text = fields.section("text_config")
    if text is None and "hidden_size" in fields:
        text = Fields(fields.path, dict(fields.values))
    if text is None:
        raise fields.invalid("text_config", "missing; it must hold the fields of the language model")
    known = (family.model_type, *family.aliases)
    if text.get("model_type", family.model_type) not in known:
        raise fields.unsupported("text_config.model_type", text.get("model_type"), ", ".join(known))
    outer = {name: fields.get(name) for name in OUTER_FIRST if fields.get(name) is not None}
    values = {**fields.values, **text.values, **outer, "architectures": [family.architecture]}
    return Fields(fields.path, values | {name: _plain_rope(values[name]) for name in ROPE_FIELDS if name in values})


def _plain_rope(rope: object) -> object:
    """M-RoPE (Qwen2-VL) turns parts of a head by the time, the height and the width of an image. For text all three are
    the position of the token, and so it is the plain embedding."""
    if not isinstance(rope, Mapping) or MROPE not in (rope.get("rope_type"), rope.get("type")):
        return rope
    return {**rope, "rope_type": "default"}
