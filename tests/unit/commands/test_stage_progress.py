"""A command that works in stages reports to the operator what it shows on stderr."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from millstream import stage_progress
from millstream.stage_progress import StageProgress
from millstream_operator.probing.step_progress import read_step_progress
from millstream_operator.rendering.runtime_config import RUNTIME_PORT


def test_what_is_reported_is_what_the_operator_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("millstream.stage_progress.time.monotonic", lambda: now[0])
    progress = StageProgress()
    assert read_step_progress(progress.report()) is None
    progress("layers", 8, 32)
    assert read_step_progress(progress.report()) == "layer 9 of 32"
    now[0] += 60
    progress("layers", 9, 32)
    assert read_step_progress(progress.report()) == "layer 10 of 32, about 30 min left"
    progress("quality", 0, 5000)
    assert read_step_progress(progress.report()) == "quality 0 %"


@pytest.mark.parametrize("in_a_pod", [True, False])
def test_it_answers_in_a_pod_alone(in_a_pod: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[tuple[Any, int]] = []

    def serve(report: Mapping[str, object], port: int) -> None:
        served.append((report, port))

    monkeypatch.setattr(stage_progress, "serve_report", serve)
    if in_a_pod:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    else:
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    progress = StageProgress()
    progress.serve_in_a_pod()
    assert served == ([(progress.report, RUNTIME_PORT)] if in_a_pod else [])
