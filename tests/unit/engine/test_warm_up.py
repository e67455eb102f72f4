"""What the warm-up has met, no request waits for: seen in what oneDNN tells of its own work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from millstream_runtime.engine import gpu_warm_up
from millstream_runtime.engine.device_policy import AcceleratorPolicy
from millstream_runtime.engine.execution import shard_config
from millstream_runtime.engine.execution.execution_mode import Execution
from millstream_runtime.engine.execution.model_runner import Launched
from millstream_runtime.engine.scheduling.step_plan import Chunk
from millstream_runtime.models.cpu import two_layouts
from tests.support.engines import MakeEngine, WriteModel
from tests.support.tiny_model import write_tiny_model

CPU = torch.device("cpu")

# oneDNN tells on standard output when it makes code for a shape ("cache_miss"), from its first use in a process on.
SERVE = """
import sys
import millstream_runtime.engine
import torch
from millstream_runtime.config import RuntimeConfig
from millstream_runtime.engine.cpu import warm_up
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.request import Request, SamplingParams

warm_up.MOST_DECODES_SECONDS = 1e9  # a slow processor ends the warm-up early, and meets fewer numbers of requests
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


@pytest.mark.deep
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


@pytest.mark.parametrize("max_num_batched_tokens", [64, 2048])
def test_a_gpu_runs_the_sampler_the_longest_and_mixed_steps_before_the_first_request(
    max_num_batched_tokens: int, write_model: WriteModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = AcceleratorPolicy(CPU, 1, gpu_warm_up.run)
    monkeypatch.setattr(shard_config, "device_policy_for", lambda device, num_ranks: policy)
    engine = make_engine(
        write_model(), execution=Execution(overlapped=True), max_num_batched_tokens=max_num_batched_tokens
    )
    monkeypatch.setattr(engine, "_time_steps", lambda: None)
    steps: list[list[Chunk]] = []
    launch = engine._runner.launch

    def watched(chunks: list[Chunk]) -> Launched:
        steps.append(list(chunks))
        return launch(chunks)

    monkeypatch.setattr(engine._runner, "launch", watched)
    engine.warm_up()
    longest = min(max_num_batched_tokens, engine.model_config.max_model_len - 1)
    sizes = [[num_tokens for _, num_tokens in chunks] for chunks in steps]
    assert [longest] in sizes
    assert any(1 in step and max(step) > longest // 2 for step in sizes)
    asked = {chunk.sequence.request.sampling for chunks in steps for chunk in chunks}
    assert {*gpu_warm_up.SAMPLERS} <= asked
    assert engine.stats().kv_blocks_used == 0
