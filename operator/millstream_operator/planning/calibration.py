"""Corrections of predicted memory by what runtimes measured. Pure.

    measured bytes / predicted bytes -> Correction     per image, model, format, GPU and tensor-parallel size

A correction is a ratio in thousandths, so that it holds for other engine limits too: it is applied to each part of the
ledger that is predicted for a candidate. `other` is what no part names: the context, libraries, NCCL, fragmentation. It
follows from the KV cache that the runtime got.

A new plan takes today's corrections. A pinned plan keeps those that it was made with (`of_plan`): it is compared and
adopted with them, so a new measurement never makes a plan outdated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millstream_operator.catalog.model_shape import ModelShape

PARTS = ("weights", "activations", "graphs", "other")
PART_OF_FIELD = {
    "weights_bytes": "weights",
    "embeddings_bytes": "weights",
    "draft_weights_bytes": "weights",
    "activations_bytes": "activations",
    "graphs_bytes": "graphs",
    "context_bytes": "other",
    "nccl_bytes": "other",
}
UNCHANGED_PERMILLE = 1000
# A measurement that is further from its prediction than this factor, in percent, is an error of one of them and no
# correction. Weights are counted: they are known well. Graphs and the rest are small estimates: graphs took 3.3 times
# theirs on an H200.
ABSURD_PERCENT = {"weights": 150, "activations": 400, "graphs": 1000, "other": 1000}
MAX_USED = 16  # corrections that a plan keeps
ANY = "*"


@dataclass(frozen=True, slots=True, order=True)
class CalibrationKey:
    """What a measurement holds for. `accelerator`: the catalogue's name of the GPU."""

    image: str
    model: str
    quantization: str
    accelerator: str
    tensor: int


@dataclass(frozen=True, slots=True)
class Correction:
    """Measured over predicted, in thousandths."""

    weights_permille: int = UNCHANGED_PERMILLE
    activations_permille: int = UNCHANGED_PERMILLE
    graphs_permille: int = UNCHANGED_PERMILLE
    other_permille: int = UNCHANGED_PERMILLE

    def corrected(self, field_name: str, predicted_bytes: int) -> int:
        """Return the corrected bytes of a field of the ledger; the headroom is not corrected."""
        part = PART_OF_FIELD.get(field_name)
        return predicted_bytes if part is None else -(-predicted_bytes * self.permille(part) // 1000)

    def permille(self, part: str) -> int:
        found: int = getattr(self, f"{part}_permille")
        return found

    def as_dict(self) -> dict[str, int]:
        return {f"{part}Permille": self.permille(part) for part in PARTS}


NO_CORRECTION = Correction()


@dataclass(frozen=True, slots=True)
class Calibration:
    """Corrections by key, each key once. Of tuples, because what candidates are judged by is hashed."""

    entries: tuple[tuple[CalibrationKey, Correction], ...] = ()

    def of(self, image: str, shape: ModelShape) -> Calibration:
        """Return those of one image and one model."""
        model = model_key(shape) if self.entries else ""
        found = sorted(
            (entry for entry in self.entries if entry[0].image in (image, ANY) and entry[0].model in (model, ANY)),
            key=lambda entry: entry[0],
        )
        return Calibration(tuple(found[:MAX_USED]))

    def correction(self, accelerator: str, quantization: str, tensor: int) -> Correction:
        """Return the correction of a placement; nothing is changed where none was measured."""
        for key, correction in self.entries:
            if (key.accelerator, key.quantization, key.tensor) == (accelerator, quantization, tensor):
                return correction
        return NO_CORRECTION

    def as_list(self) -> list[dict[str, Any]]:
        """Return the form in `status.plan.calibration`."""
        return [
            {
                "accelerator": key.accelerator,
                "tensorParallelSize": key.tensor,
                "quantization": key.quantization,
                **correction.as_dict(),
            }
            for key, correction in self.entries
        ]


NO_CALIBRATION = Calibration()


def of_plan(plan: Mapping[str, Any]) -> Calibration:
    """Return the corrections that a `status.plan` was made with: for its own model, whatever the image."""
    found = []
    for one in plan.get("calibration") or ():
        key = CalibrationKey(ANY, ANY, one["quantization"], one["accelerator"], one["tensorParallelSize"])
        found.append((key, Correction(*(one[f"{part}Permille"] for part in PARTS))))
    return Calibration(tuple(found))


def model_key(shape: ModelShape) -> str:
    """Return `llama-0123456789ab`: the family, and a hash of every size."""
    return f"{shape.family}-{hashlib.sha256(repr(shape).encode()).hexdigest()[:12]}"


def absurd(part: str, predicted_bytes: int, measured_bytes: int) -> str | None:
    """Return why a measurement is ignored; None where it can be true."""
    if measured_bytes <= 0:
        return f"{part}: {measured_bytes} bytes measured"
    factor = ABSURD_PERCENT[part]
    if measured_bytes * 100 > predicted_bytes * factor or measured_bytes * factor < predicted_bytes * 100:
        return f"{part}: {_gb(measured_bytes)} measured where {_gb(predicted_bytes)} were predicted"
    return None


def with_measurement(
    known: Correction | None, predicted: Mapping[str, int], measured: Mapping[str, int]
) -> tuple[Correction, tuple[str, ...]]:
    """Return the correction with one more measurement, and what of it is ignored, each with the reason.

    Both are bytes by part; a part that was not measured is absent. The larger of two corrections of a part is kept:
    too small a prediction ends in OutOfMemory, and a correction that only grows is not written in turns.
    """
    values, ignored = {}, []
    for part in PARTS:
        before = known.permille(part) if known is not None else None
        if part in measured:
            if (why := absurd(part, predicted[part], measured[part])) is not None:
                ignored.append(why)
            else:
                permille = -(-measured[part] * 1000 // predicted[part])
                before = permille if before is None else max(before, permille)
        values[f"{part}_permille"] = UNCHANGED_PERMILLE if before is None else before
    return Correction(**values), tuple(ignored)


def differs(one: Correction, other: Correction, percent: int) -> bool:
    """Return whether a part of `other` is more than `percent` away from `one`."""
    pairs = ((one.permille(part), other.permille(part)) for part in PARTS)
    return any(abs(after - before) * 100 > before * percent for before, after in pairs)


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
