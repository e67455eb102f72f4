"""What a plan counts for the process that computes is enough for it, before any weight."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from millstream_operator.catalog.read_shape import read_shape
from millstream_operator.planning.sizing import cpu_memory
from millstream_runtime.engine.kv import pool_size

MODEL = Path(__file__).resolve().parents[3] / "models" / "demo-draft"
# A whole engine, as the engine process makes it; its pool takes memory once a request writes to it.
LOAD = f"""
import sys
from millstream_runtime.config import Device, DType, RuntimeConfig
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.host_limits import claimed_bytes
config = RuntimeConfig(
    model={str(MODEL)!r},
    served_model_name="m",
    device=Device.CPU,
    dtype=DType(sys.argv[1]),
    kv_cache_memory_bytes=1 << 20,
    max_model_len=64,
)
engine = Engine(config, lambda phase, message="": None)
print("bytes", claimed_bytes() - engine.memory_use.weights_bytes)
"""


@pytest.mark.parametrize(("dtype", "planned"), [("float32", "FP32"), ("bfloat16", "BF16")])
def test_the_engine_takes_no_more_than_a_plan_counts(dtype: str, planned: str) -> None:
    """As the kernel counts it. A model of bfloat16 has the code of oneDNN's check, where the CPU passes it."""
    answer = subprocess.run([sys.executable, "-c", LOAD, dtype], capture_output=True, text=True, check=True)
    shape = replace(read_shape(json.loads((MODEL / "config.json").read_text())), dtype=planned)
    assert int(answer.stdout.split()[-1]) <= cpu_memory.process_bytes(shape) - pool_size.CPU_RESERVE_BYTES
