"""The result is judged on the device that it was made on, not always on a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from millstream_runtime.config import Device
from millstream_runtime.errors import FailureReason, InvalidConfigError, RuntimeFailure
from millstream_runtime.quantize import make
from millstream_runtime.quantize.settings import Method, QuantizeSettings
from tests.unit.quantize.conftest import quantize

SETTINGS = QuantizeSettings(
    model=Path("model"),
    out=Path("out"),
    method=Method.RTN,
    group_size=None,
    calibration=None,
    held_out=None,
    sequence_tokens=512,
    max_sequences=128,
    seed=0,
    device="auto",
    with_quality=True,
)


@pytest.mark.parametrize(
    ("device", "has_gpu", "method", "expected"),
    [
        ("auto", True, Method.RTN, Device.CUDA),
        ("cuda", True, Method.AWQ, Device.CUDA),
        ("cpu", True, Method.AWQ, Device.CPU),
        ("auto", False, Method.RTN, Device.CPU),
        ("cuda", True, Method.GGUF, Device.CPU),
    ],
)
def test_where_it_is_judged(
    device: str, has_gpu: bool, method: Method, expected: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert make.judging_device(replace(SETTINGS, device=device, method=method)) is expected


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidConfigError, match="torch finds no CUDA device"):
        make.judging_device(replace(SETTINGS, device="cuda"))


@pytest.mark.deep
def test_both_models_are_loaded_there(
    tiny: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found: list[Device] = []

    def compare(base: Any, candidate: Any, *_: Any) -> dict[str, Any]:
        found.extend((base.device, candidate.device))
        raise RuntimeFailure(FailureReason.OUT_OF_MEMORY, "The device has no room for both.")

    monkeypatch.setattr(make, "compare", compare)
    monkeypatch.setattr(make, "judging_device", lambda settings: Device.CUDA)
    assert quantize(tiny, tmp_path / "out", "--method=rtn", f"--calibration={data}") == 1
    assert found == [Device.CUDA, Device.CUDA]
    assert "--no-quality to take it as it is, and judge it by `millstream quality --device cpu`." in (
        capsys.readouterr().err
    )
