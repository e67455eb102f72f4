"""`status.stepTimes`: the times of steps that the plan predicted, and those that one pod measured. Pure.

As in `memory_report`, it is measured once per revision. On a CPU nothing is predicted.
"""

from __future__ import annotations

from typing import Any

from millstream_operator.planning.calibration import NO_CORRECTION, STEPS, Correction, of_plan
from millstream_operator.planning.measurement import Measurement, StepSample
from millstream_operator.status.observation import Observation

Manifest = dict[str, Any]


def step_times_status(observation: Observation) -> Manifest | None:
    """The field as it is written; None where nothing was measured."""
    known: Manifest = observation.previous.get("stepTimes") or {}
    rollout = observation.previous.get("rollout") or {}
    if known and rollout.get("updateRevision") == observation.revision.name:
        return known
    answer = observation.answer
    if answer is None or answer.measured is None or not answer.measured.steps or observation.is_rolled_back:
        return None
    samples = {sample.step: sample for sample in answer.measured.steps}
    measured = {step: sample.microseconds for step, sample in samples.items()}
    found: Manifest = {"measured": _times(samples, measured)}
    if observation.compared is not None:
        correction = plan_correction(observation.revision.plan)
        found["predicted"] = _times(samples, _predicted(observation.compared, correction))
        if steps := correction.steps_as_dict():
            found["correction"] = steps
    return found


def plan_correction(plan: Manifest) -> Correction:
    """Return what the plan's own placement was corrected by."""
    if not plan.get("calibration"):
        return NO_CORRECTION
    return of_plan(plan).correction(plan["accelerator"], plan["quantization"], plan["tensorParallelSize"])


def _predicted(compared: Measurement, correction: Correction) -> dict[str, int]:
    """Microseconds by step, as the plan sees them."""
    factors = {
        "decode": correction.decode_factor(1),
        "batch": correction.decode_factor(compared.batch_sequences),
        "prefill": correction.prefill_factor,
    }
    return {step: round(compared.predicted[step] * factors[step]) for step in STEPS if step in compared.predicted}


def _times(samples: dict[str, StepSample], microseconds: dict[str, int]) -> Manifest:
    times: Manifest = {f"{step}Microseconds": value for step, value in microseconds.items()}
    if "batch" in samples:
        times["batchSequences"] = samples["batch"].sequences
    if "prefill" in samples:
        times["prefillTokens"] = samples["prefill"].new_tokens
    return times
