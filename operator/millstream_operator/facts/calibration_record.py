"""The ConfigMap that keeps corrections: written by the leader, read by every operator of the release. Pure.

    millstream-calibration    data: {<key>: {"image": …, "model": …, "accelerator": …, "graphsPermille": …}}

Its content is untrusted: an entry that cannot be read is dropped. It holds no name of a tenant, a namespace or a model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from millstream_operator.planning.calibration import PARTS, CalibrationKey, Correction

MAX_ENTRIES = 128
MAX_ENTRY_LENGTH = 2048
CORRECTION_RANGE = range(100, 10_001)  # thousandths; see `calibration.ABSURD_PERCENT`
APP_LABELS = {"app.kubernetes.io/managed-by": "millstream-operator", "app.kubernetes.io/component": "calibration"}


@dataclass(frozen=True, slots=True)
class Entry:
    """`number` grows with each write: where there is no room, the entry with the smallest is dropped."""

    key: CalibrationKey
    correction: Correction
    number: int = 0


def data_key(key: CalibrationKey) -> str:
    return hashlib.sha256(json.dumps(asdict(key), sort_keys=True).encode()).hexdigest()[:16]


def config_map(namespace: str, name: str, entries: Mapping[CalibrationKey, Entry], version: str) -> dict[str, Any]:
    """Return the object to apply. `version`: the resourceVersion that it replaces, so that no other write is lost."""
    kept = sorted(entries.values(), key=lambda one: one.number)[-MAX_ENTRIES:]
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": namespace, "labels": APP_LABELS, "resourceVersion": version},
        "data": {data_key(one.key): _text(one) for one in kept},
    }


def read_entries(stored: Mapping[str, Any] | None) -> dict[CalibrationKey, Entry]:
    """Return the entries of the object; those that cannot be read are left out."""
    data = (stored or {}).get("data") or {}
    read = [_entry(text) for text in list(data.values())[:MAX_ENTRIES] if isinstance(text, str)]
    return {one.key: one for one in read if one is not None}


def _text(entry: Entry) -> str:
    correction = {f"{part}Permille": entry.correction.permille(part) for part in PARTS}
    return json.dumps({**asdict(entry.key), **correction, "number": entry.number}, sort_keys=True)


def _entry(text: str) -> Entry | None:
    try:
        value = json.loads(text) if len(text) <= MAX_ENTRY_LENGTH else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    words: list[Any] = [value.get(name) for name in ("image", "model", "quantization", "accelerator")]
    numbers: list[Any] = [value.get(f"{part}Permille") for part in PARTS]
    tensor, number = value.get("tensor"), value.get("number")
    if not all(isinstance(word, str) and 0 < len(word) <= 600 for word in words):
        return None
    if not all(type(one) is int and one in CORRECTION_RANGE for one in numbers):
        return None
    if type(tensor) is not int or not 1 <= tensor <= 64 or type(number) is not int or not 0 <= number < 1 << 53:
        return None
    image, model, quantization, accelerator = words
    key = CalibrationKey(image, model, quantization, accelerator, tensor)
    return Entry(key, Correction(*numbers), number)
