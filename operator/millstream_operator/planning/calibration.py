"""Corrections of predicted memory and step times by what runtimes measured. Pure.

    measured / predicted -> Correction     per image, model, format, GPU and tensor-parallel size

A correction is a ratio in thousandths, so that it holds for other engine limits too: it is applied to each part of the
ledger that is predicted for a candidate. `other` is what no part names: the context, libraries, NCCL, fragmentation. It
follows from the KV cache that the runtime got.

A new plan takes today's corrections. A pinned plan keeps those that it was made with (`of_plan`): it is compared and
adopted with them, so a new measurement never makes a plan outdated.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from millstream_operator.catalog.model_shape import ModelShape

PARTS = ("weights", "activations", "graphs", "other")
# Times: a decode step of one request, one of a full batch (`batch_sequences`), and a prompt up to its first token.
STEPS = ("decode", "batch", "prefill")
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
# theirs on an H200. Steps of a small model are mostly launches, which the roofline knows little of.
ABSURD_PERCENT = {"weights": 150, "activations": 400, "graphs": 1000, "other": 1000} | dict.fromkeys(STEPS, 500)
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
    """Measured over predicted, in thousandths. `batch_sequences`: of the batch that was measured; 1: none was."""

    weights_permille: int = UNCHANGED_PERMILLE
    activations_permille: int = UNCHANGED_PERMILLE
    graphs_permille: int = UNCHANGED_PERMILLE
    other_permille: int = UNCHANGED_PERMILLE
    decode_permille: int = UNCHANGED_PERMILLE
    batch_permille: int = UNCHANGED_PERMILLE
    prefill_permille: int = UNCHANGED_PERMILLE
    batch_sequences: int = 1

    def corrected(self, field_name: str, predicted_bytes: int) -> int:
        """Return the corrected bytes of a field of the ledger; the headroom is not corrected."""
        part = PART_OF_FIELD.get(field_name)
        return predicted_bytes if part is None else -(-predicted_bytes * self.permille(part) // 1000)

    def permille(self, part: str) -> int:
        found: int = getattr(self, f"{part}_permille")
        return found

    def decode_factor(self, sequences: int) -> float:
        """Return the factor for a decode step: between one request and the batch by the logarithm of their number."""
        alone, batch = self.decode_permille / 1000, self.batch_permille / 1000
        if self.batch_sequences <= 1:
            return alone
        return alone + (batch - alone) * min(1.0, math.log(sequences) / math.log(self.batch_sequences))

    @property
    def prefill_factor(self) -> float:
        return self.prefill_permille / 1000

    @property
    def has_steps(self) -> bool:
        """Whether a step time is corrected."""
        return any(self.permille(step) != UNCHANGED_PERMILLE for step in STEPS)

    def as_dict(self) -> dict[str, int]:
        """Return the form that is stored. Step times are absent where none is corrected, as in older records."""
        return {f"{part}Permille": self.permille(part) for part in PARTS} | self.steps_as_dict()

    def steps_as_dict(self) -> dict[str, int]:
        if not self.has_steps:
            return {}
        steps = {f"{step}Permille": self.permille(step) for step in STEPS}
        return steps | {"batchSequences": self.batch_sequences}

    @classmethod
    def of_dict(cls, stored: Mapping[str, int]) -> Correction:
        """Read what `as_dict` returned."""
        memory = {f"{part}_permille": stored[f"{part}Permille"] for part in PARTS}
        steps = {f"{step}_permille": stored.get(f"{step}Permille", UNCHANGED_PERMILLE) for step in STEPS}
        return cls(**memory, **steps, batch_sequences=stored.get("batchSequences", 1))


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
        found.append((key, Correction.of_dict(one)))
    return Calibration(tuple(found))


def model_key(shape: ModelShape) -> str:
    """Return `llama-0123456789ab`: the family, and a hash of every size."""
    return f"{shape.family}-{hashlib.sha256(repr(shape).encode()).hexdigest()[:12]}"


def absurd(part: str, predicted: int, measured: int) -> str | None:
    """Return why a measurement (bytes, or microseconds of a step) is ignored; None where it can be true."""
    if measured <= 0:
        return f"{part}: {measured} {'µs' if part in STEPS else 'bytes'} measured"
    factor = ABSURD_PERCENT[part]
    if measured * 100 > predicted * factor or measured * factor < predicted * 100:
        return f"{part}: {_amount(part, measured)} measured where {_amount(part, predicted)} were predicted"
    return None


def with_measurement(
    known: Correction, predicted: Mapping[str, int], measured: Mapping[str, int], batch_sequences: int = 1
) -> tuple[Correction, tuple[str, ...]]:
    """Return the correction after one more measurement, and what of it is ignored, each with the reason.

    Both are bytes or microseconds by part; a part that was not measured, or is ignored, keeps what was known. The
    latest measurement replaces the one before, so that a correction falls as well as rises.
    """
    found, ignored = known, []
    for part in (*PARTS, *STEPS):
        if part not in measured:
            continue
        if (why := absurd(part, predicted[part], measured[part])) is not None:
            ignored.append(why)
            continue
        permille = -(-measured[part] * 1000 // predicted[part])
        found = replace(found, **{f"{part}_permille": permille})
        if part == "batch":
            found = replace(found, batch_sequences=batch_sequences)
    return found, tuple(ignored)


def differs(one: Correction, other: Correction, percent: int) -> bool:
    """Return whether a part of `other` is more than `percent` away from `one`."""
    pairs = ((one.permille(part), other.permille(part)) for part in (*PARTS, *STEPS))
    return any(abs(after - before) * 100 > before * percent for before, after in pairs)


def _amount(part: str, value: int) -> str:
    return f"{value} µs" if part in STEPS else f"{value / 1e9:.2f} GB"
