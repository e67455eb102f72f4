"""A folder of ModelOpt, whose config.json does not say that it is quantized, is refused by the file that says it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.models.registry import load_model_config
from millstream_runtime.sources.inspection.shape import describe
from millstream_runtime.sources.safetensors_header import WeightsSummary
from tests.unit.contracts.test_config_json_fields import BASE

NAME = "hf_quant_config.json"
FP8: dict[str, Any] = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}


def write(folder: Path, content: str) -> dict[str, bytes]:
    (folder / "config.json").write_text(json.dumps(BASE))
    (folder / NAME).write_text(content)
    return {name: (folder / name).read_bytes() for name in ("config.json", NAME)}


def test_the_file_and_the_format_are_named_at_boot_and_by_the_inspection(tmp_path: Path) -> None:
    files = write(tmp_path, json.dumps(FP8))
    with pytest.raises(RuntimeFailure) as at_boot:
        load_model_config(tmp_path)
    with pytest.raises(RuntimeFailure) as inspected:
        describe({}, None, None, files, WeightsSummary())
    for caught in (at_boot.value, inspected.value):
        assert caught.reason is FailureReason.UNSUPPORTED_BY_RUNTIME
        assert f"{NAME}: quantization.quant_algo 'FP8' of ModelOpt is not supported" in caught.message


@pytest.mark.parametrize("content", ["", "[]", "{", '{"quantization": {"quant_algo": null}}', '{"quantization": 7}'])
def test_a_file_that_names_no_format_says_nothing(content: str, tmp_path: Path) -> None:
    write(tmp_path, content)
    assert load_model_config(tmp_path).quantization is None
