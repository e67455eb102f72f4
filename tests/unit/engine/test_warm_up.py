"""What the warm-up has met, no request waits for: seen in what oneDNN tells of its own work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from millstream_runtime.models.cpu import two_layouts
from tests.support.tiny_model import write_tiny_model

CPU = torch.device("cpu")

# oneDNN tells on standard output when it makes code for a shape ("cache_miss"), from its first use in a process on.
SERVE = """
import sys
import millstream_runtime.engine
import torch
from millstream_runtime.config import RuntimeConfig
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.request import Request, SamplingParams

engine = Engine(RuntimeConfig(model=sys.argv[1], served_model_name="tiny"), lambda phase, message: None)
engine.warm_up()
print("ready", flush=True)
for number in range(16):
    sampling = SamplingParams(max_tokens=3 + number, ignore_eos=True)
    engine.add_request(Request(f"user-{number}", [number], sampling))
while engine.has_work():
    engine.step()
print("served", flush=True)
engine.add_request(Request("long", list(range(40)), SamplingParams(max_tokens=1)))
while engine.has_work():
    engine.step()
"""


@pytest.mark.skipif(not two_layouts.can_pack(torch.float32, CPU), reason="torch without oneDNN")
@pytest.mark.parametrize("threads", [1, 2])
def test_decodes_of_up_to_16_requests_wait_for_no_code_to_be_made(tmp_path: Path, threads: int) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    environment = {
        "ONEDNN_VERBOSE": "profile_create",
        "PYTHONPATH": ":".join(sys.path),
        "OMP_NUM_THREADS": str(threads),
    }
    done = subprocess.run(
        [sys.executable, "-c", SERVE, str(model)], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
    warm_up, rest = done.stdout.split("ready\n")
    served, after = rest.split("served\n")
    made = [line for line in served.splitlines() if "cache_miss" in line]
    assert "cache_miss" in warm_up
    assert not made, "while 16 requests were served"
    assert "cache_miss" in after, "a prompt of another length: the telling works, and such a length is met once"
