"""Which ControllerRevisions the index keeps whole: an author's edits must not fill the operator's memory.

A revision holds the pod template, so one of a large spec is as large as the spec. Of an owner the index keeps whole

- the newest, which is what runs or what the rollout makes,
- the newest that answered, which is what a failed one goes back to, and
- newer ones before older ones, as long as all together have at most RECORD_BYTES.

The others are kept without their data, as if their format were not known here: they are counted, and pruned, and
nothing is read from them. A later listing brings them whole again where they have become needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from millstream_operator.rendering.revision_marks import read_marks

Manifest = dict[str, Any]
RECORD_BYTES = 256 << 10  # about: of the texts and entries of the records of one owner
LARGE_BYTES = RECORD_BYTES // 8  # smaller ones are not looked at


def to_thin(records: Iterable[Manifest], num_bytes: Mapping[str, int]) -> list[Manifest]:
    """The records of one owner that are to be kept without data. `num_bytes`: of the large ones, by name. Pure."""
    newest_first = sorted(records, key=lambda one: (int(one["revision"]), one["metadata"]["name"]), reverse=True)
    answered = next((one for one in newest_first if read_marks(one).answered), None)
    left, thin = RECORD_BYTES, []
    needed = [one for one in newest_first if one is newest_first[0] or one is answered]
    for record in [*needed, *(one for one in newest_first if not any(one is other for other in needed))]:
        if (size := num_bytes.get(record["metadata"]["name"], 0)) == 0:
            continue
        left -= size
        if left < 0 and not any(record is other for other in needed):
            thin.append(record)
    return [one for one in thin if not is_thin(one)]


def thinned(record: Manifest) -> Manifest:
    """The record without its data."""
    return {name: value for name, value in record.items() if name != "data"}


def is_thin(record: Manifest) -> bool:
    return "data" not in record
