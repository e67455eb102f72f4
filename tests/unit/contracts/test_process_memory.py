"""What a plan counts for the process that computes is enough for it, before any weight."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from millstream_operator.planning.sizing import cpu_memory
from millstream_runtime.engine.kv import pool_size

MODEL = Path(__file__).resolve().parents[3] / "models" / "demo-draft"
# A whole engine, as the engine process makes it; its pool takes memory once a request writes to it.
LOAD = f"""
from millstream_runtime.config import Device, RuntimeConfig
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.host_limits import claimed_bytes
config = RuntimeConfig(
    model={str(MODEL)!r}, served_model_name="m", device=Device.CPU, kv_cache_memory_bytes=1 << 20, max_model_len=64
)
engine = Engine(config, lambda phase, message="": None)
print("bytes", claimed_bytes() - engine.memory_use.weights_bytes)
"""


def test_the_engine_takes_no_more_than_a_plan_counts() -> None:
    """As the kernel counts it."""
    answer = subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, check=True)
    assert int(answer.stdout.split()[-1]) <= cpu_memory.PROCESS_BYTES - pool_size.CPU_RESERVE_BYTES
