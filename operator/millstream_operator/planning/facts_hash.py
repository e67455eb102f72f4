"""The hash of the facts that a plan was made from: GPUs, prices, the model's shape.

It decides nothing; it shows a person whether two plans were made from the same facts. It covers all GPUs of the
cluster, not those that are free at the moment.
"""

from __future__ import annotations

import hashlib
import json

from millstream_operator.planning.facts import Facts
from millstream_operator.planning.restart_fields import HASH_LENGTH


def facts_hash(facts: Facts) -> str:
    """Return sixteen hex digits: equal for equal facts, on every machine."""
    everything = facts.capacity or facts.inventory
    kinds = [(kind.part.name, kind.gpus, kind.nodes) for kind in everything.kinds] if everything is not None else None
    shapes = [repr(facts.shape), repr(facts.draft_shape)]  # of frozen dataclasses of numbers, words and tuples
    text = json.dumps([shapes, kinds, facts.catalog.fingerprint])
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_LENGTH]
