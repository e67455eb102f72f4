"""What a step frees, the next step finds again, without the kernel between them."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.deep

# Blocks of 48 MiB, as the activations of a long prompt are; it takes some steps until all have their place. malloc's
# settings stay with a process, so each way has its own.
SCRIPT = """
import resource, sys
import torch
from millstream_runtime.engine.cpu.freed_memory import keep_freed_memory

if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit(3)

def step():
    return [torch.ones(12 << 20) for _ in range(3)]

for _ in range(10):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(way: str) -> int:
    done = subprocess.run([sys.executable, "-c", SCRIPT, way], capture_output=True, text=True, timeout=240)
    if done.returncode == 3:
        pytest.skip("this C library has no mallopt")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_steps_do_not_ask_the_kernel_for_the_same_memory_again() -> None:
    assert faults("keep") < 100
    assert faults("default") > 1000  # what the setting is for: else it may go
