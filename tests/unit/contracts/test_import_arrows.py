"""The arrows of docs/architecture.md, checked by importing in a fresh interpreter what must stay light."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "triton", "transformers", "fastapi", "uvicorn")


@pytest.mark.parametrize(
    "module",
    [
        "millstream_operator",
        "millstream_gateway.explanation",
        "millstream_gateway.state_file",
        "millstream_runtime.config",
        "millstream_runtime.config_json_fields",
        "millstream_runtime.context_limit",
        "millstream_runtime.errors",
        "millstream_runtime.kv_formats",
        "millstream_runtime.kv_layout",
        "millstream_runtime.layer_windows",
        "millstream_runtime.model_families",
        "millstream_runtime.sources.fetch",
        "millstream_runtime.sources.inspection.inspect",
    ],
)
def test_light_modules_load_nothing_heavy(module: str) -> None:
    program = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_folder_operator_never_shadows_the_standard_library() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import operator; print(operator.add(1, 2))"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "3"
