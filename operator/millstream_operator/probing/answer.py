"""The result of probing a model through its Service."""

from __future__ import annotations

from dataclasses import dataclass

from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.planning.measurement import PodMeasurement
from millstream_operator.probing.boot_report import BootReport


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a probe. `failure` None: the model answered."""

    failure: Diagnosis | None = None
    boot: BootReport | None = None  # of the pod that answered
    keys_problem: str | None = None  # of the file with API keys, by the runtime; "": none, None: not reported
    measured: PodMeasurement | None = None  # of a pod that is the LLMDeployment's own; None: none was asked
    is_busy: bool = False  # a failure for want of room in the model's queue
