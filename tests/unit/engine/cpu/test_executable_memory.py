"""A process that may run no code that it has written: every product is computed by code that the libraries brought."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.deep

DEMO_MODEL = Path(__file__).resolve().parents[4] / "models" / "demo-chat"

CHILD = """
import ctypes, json, sys
libc, word = ctypes.CDLL(None, use_errno=True), ctypes.c_ulong
if sys.argv[1] == "refused" and libc.prctl(65, word(1), word(0), word(0), word(0)):  # PR_SET_MDWE: Linux 6.3
    raise SystemExit(77)
import torch
from millstream_runtime.config import Device, RuntimeConfig
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.request import Request, SamplingParams
from millstream_runtime.models.cpu.half_weights import half_copy
from millstream_runtime.quantization.cpu.int8_linear import levels

engine = Engine(RuntimeConfig(model=sys.argv[2], served_model_name="demo", device=Device.CPU), lambda *_: None)
engine.warm_up()
for index in range(3):
    sampling = SamplingParams(8, temperature=0.0)
    engine.add_request(Request(str(index), list(range(5, 60 + index)), sampling))
tokens = {}
while engine.has_work():
    for output in engine.step():
        tokens.setdefault(output.request_id, []).append(output.token_id)
torch.manual_seed(0)
weight, x = torch.randn(256, 512).half().float(), torch.randn(4, 256)
half = half_copy(weight)
error = 0.0 if half is None else float((half.product(x) - x @ weight).abs().max())
reasons = {one.part: one.reason for one in engine.kernels}
print(json.dumps({"tokens": tokens, "reasons": reasons, "half_error": error, "levels": levels()}))
"""


@pytest.fixture(scope="module")
def answers() -> dict[str, dict[str, object]]:
    found = {}
    for mode in ("allowed", "refused"):
        child = subprocess.run(
            [sys.executable, "-c", CHILD, mode, str(DEMO_MODEL)], capture_output=True, text=True, timeout=300
        )
        if child.returncode == 77:
            pytest.skip("this kernel has no PR_SET_MDWE")
        assert child.returncode == 0, child.stderr[-2000:]
        found[mode] = json.loads(child.stdout.splitlines()[-1])
    return found


def test_the_engine_answers_as_ever(answers: dict[str, dict[str, object]]) -> None:
    assert answers["refused"]["tokens"] == answers["allowed"]["tokens"]


def test_torch_computes_in_place_of_compiled_kernels_and_says_why(answers: dict[str, dict[str, object]]) -> None:
    reasons = answers["refused"]["reasons"]
    assert isinstance(reasons, dict)
    assert "may not become executable" in reasons["decode_attention"]


def test_copies_in_float16_and_in_8_bits_give_no_wrong_number(answers: dict[str, dict[str, object]]) -> None:
    """`levels` is 0 where FBGEMM's 8-bit products are not exact: then they are not used."""
    assert answers["allowed"]["half_error"] == pytest.approx(answers["refused"]["half_error"], abs=1e-4)
    assert answers["refused"]["levels"] in (0, answers["allowed"]["levels"])
