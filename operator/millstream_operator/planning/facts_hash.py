"""The hash of the facts that a plan was made from: GPUs, prices, the model's shape.

It decides nothing; it shows a person whether two plans were made from the same facts. It covers all GPUs of the
cluster, not those that are free at the moment.
"""

from __future__ import annotations

import hashlib
import json

from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.restart_fields import HASH_LENGTH


def facts_hash(facts: Facts) -> str:
    """Return sixteen hex digits: equal for equal facts, on every machine."""
    everything = facts.capacity or facts.inventory
    kinds = [(kind.part.name, kind.gpus, kind.nodes) for kind in everything.kinds] if everything is not None else None
    shapes = [_words(facts.shape), _words(facts.draft_shape)]
    text = json.dumps([shapes, kinds, facts.catalog.fingerprint])
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_LENGTH]


def _words(shape: ModelShape | None) -> str:
    """Return the text of a shape: a frozen dataclass of numbers, words and tuples, and what its `repr` leaves out."""
    if shape is not None and shape.draft_head is not None:
        return f"{shape!r} {shape.draft_head!r}"
    if shape is None or shape.quantization is None:
        return repr(shape)
    block, kept = shape.quantization.block_size, shape.unquantized_parameters
    return repr(shape) if block is None and not kept else f"{shape!r} {block} {kept}"
