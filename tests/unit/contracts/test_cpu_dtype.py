"""The weights that a plan for a CPU counts are those that its pod holds, on any CPU for which code is compiled."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from millstream_operator.catalog.read_shape import read_shape
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.plan import Plan, PlanDefaults
from millstream_operator.planning.planner import decide
from millstream_operator.rendering.runtime_config import boot_config
from millstream_runtime.config import DType, RuntimeConfig
from millstream_runtime.engine.cpu import compiled_code
from millstream_runtime.engine.execution.shard_config import resolve_shard_config
from millstream_runtime.models.registry import expected_weights
from tests.support.llmdeployments import deployment

SAMPLES = Path(__file__).resolve().parents[2] / "data" / "model_configs"
CONFIG: dict[str, Any] = json.loads((SAMPLES / "llama-3.2-1b.json").read_text(encoding="utf-8"))
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
IMAGE = "registry.example.com/runtime:1"


@pytest.mark.skipif(compiled_code.load()[0] is None, reason="no kernels are compiled for this machine")
@pytest.mark.parametrize("capability", ["AVX2", "AVX512"])
@pytest.mark.parametrize("quantization", [None, AWQ], ids=["plain", "awq"])
@pytest.mark.parametrize("asked", [None, "float32", "float16"])
@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
def test_a_pod_holds_the_bytes_of_its_plan(
    stored: str,
    asked: str | None,
    quantization: dict[str, Any] | None,
    capability: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A boot file of a plan says `auto` for float32, which `millstream serve` reads as float32."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    config = CONFIG | {"torch_dtype": stored} | ({"quantization_config": quantization} if quantization else {})
    (tmp_path / "config.json").write_text(json.dumps(config))
    limited = {"containers": [{"name": "runtime", "resources": {"limits": {"memory": "16Gi"}}}]}
    spec: dict[str, Any] = {"engine": {"maxModelLen": 2048} | ({"dtype": asked} if asked else {})}
    owner = deployment(accelerator={"type": "CPU"}, podTemplate={"spec": limited}, **spec)
    plan = decide(owner, PlanDefaults(IMAGE), Facts(shape=read_shape(config)))
    assert isinstance(plan, Plan), plan.message
    assert plan.memory is not None
    runtime = RuntimeConfig.of(replace(boot_config(plan), model=str(tmp_path)))
    shard_config = resolve_shard_config(replace(runtime, auto_dtype=DType.FLOAT32))
    arithmetic = shard_config.arithmetic
    held = expected_weights(shard_config.model_config, arithmetic)
    assert plan.memory.weights_bytes + plan.memory.embeddings_bytes == pytest.approx(held.num_bytes, rel=0.005)
