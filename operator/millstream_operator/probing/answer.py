"""What came of asking the model through its Service."""

from __future__ import annotations

from dataclasses import dataclass

from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.probing.boot_report import BootReport


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of asking the model through its Service. None in `failure`: it answered."""

    failure: Diagnosis | None = None
    boot: BootReport | None = None  # of the pod that answered
