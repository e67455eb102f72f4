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

from millstream_operator.planning.calibration import PARTS, STEPS, UNCHANGED_PERMILLE, CalibrationKey, Correction
from millstream_operator.planning.measurement import MAX_BATCH_SEQUENCES

MAX_ENTRIES = 128
MAX_ENTRY_LENGTH = 2048
CORRECTION_RANGE = range(100, 10_001)  # thousandths; see `calibration.ABSURD_PERCENT`
APP_LABELS = {"app.kubernetes.io/managed-by": "millstream-operator", "app.kubernetes.io/component": "calibration"}


@dataclass(frozen=True, slots=True)
class Entry:
    """`number` grows with each write: where there is no room, the entry with the smallest is dropped.

    `at_seconds`: when the pod was created that measured it; 0 in records of older versions.
    """

    key: CalibrationKey
    correction: Correction
    number: int = 0
    at_seconds: int = 0


def config_map_name(lease_name: str) -> str:
    """Of the operator with this Lease, in its namespace."""
    return f"{lease_name}-calibration"


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
    rest = {"number": entry.number, "atSeconds": entry.at_seconds}
    return json.dumps({**asdict(entry.key), **entry.correction.as_dict(), **rest}, sort_keys=True)


def _entry(text: str) -> Entry | None:
    try:
        value = json.loads(text) if len(text) <= MAX_ENTRY_LENGTH else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    words: list[Any] = [value.get(name) for name in ("image", "model", "quantization", "accelerator")]
    numbers: list[Any] = [value.get(f"{part}Permille") for part in PARTS]
    numbers += [value.get(f"{step}Permille", UNCHANGED_PERMILLE) for step in STEPS]
    tensor, number = value.get("tensor"), value.get("number")
    batch, at_seconds = value.get("batchSequences", 1), value.get("atSeconds", 0)
    if not all(isinstance(word, str) and 0 < len(word) <= 600 for word in words):
        return None
    if not all(type(one) is int and one in CORRECTION_RANGE for one in numbers):
        return None
    if type(tensor) is not int or not 1 <= tensor <= 64 or type(number) is not int or not 0 <= number < 1 << 53:
        return None
    if type(batch) is not int or not 1 <= batch <= MAX_BATCH_SEQUENCES or type(at_seconds) is not int or at_seconds < 0:
        return None
    image, model, quantization, accelerator = words
    key = CalibrationKey(image, model, quantization, accelerator, tensor)
    return Entry(key, Correction.of_dict(value), number, at_seconds)
