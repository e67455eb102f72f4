"""The Job that judges asks for memory for one layer and two output heads, whatever the size of the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from millstream_operator.catalog.inspected_model import InspectedModel
from millstream_operator.catalog.known_models import known_shape
from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.catalog.read_shape import read_shape
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.plan import PlanDefaults
from millstream_operator.planning.spec_plan import plan_from_spec
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.preparation_job import PROCESS_BYTES, Step, StepKind, preparation_job
from millstream_runtime.job_memory.judging import judging_bytes
from millstream_runtime.models.model_parts import part_bytes
from millstream_runtime.models.registry import load_model_config
from tests.support.llmdeployments import deployment
from tests.support.prepared_models import CACHE, CALIBRATED, GATE
from tests.support.tiny_model import write_tiny_model

OWNER = deployment(
    model={"source": {"local": {"path": "model"}}} | CACHE,
    quantization=CALIBRATED | {"qualityGate": GATE},
    accelerator={"type": "CPU"},
)
GIB = 1 << 30


def in_bytes(quantity: str) -> int:
    return int(quantity[:-2]) << {"Mi": 20, "Gi": 30}[quantity[-2:]]


def memory(shape: ModelShape) -> tuple[int, int]:
    """Bytes that the Job requests, and its limit."""
    plan = plan_from_spec(OWNER, PlanDefaults("runtime:1"), Facts(shape=shape))
    source = InspectedModel(shape, "a" * 40, 16_000_000_000)
    job = preparation_job(OWNER, Step(StepKind.JUDGE, "0123456789"), plan, source, PodDefaults())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    resources = container["resources"]
    return in_bytes(resources["requests"]["memory"]), in_bytes(resources["limits"]["memory"])


@pytest.mark.parametrize(
    ("model", "most_gib"),
    [("meta-llama/Llama-3.1-8B-Instruct", 7), ("meta-llama/Llama-3.1-70B-Instruct", 12)],
)
def test_a_model_that_a_node_holds_in_16_bit_can_be_judged_there(model: str, most_gib: int) -> None:
    shape = known_shape(model)
    assert shape is not None
    requested, limit = memory(shape)
    assert requested <= most_gib * GIB
    assert limit <= 2 * shape.parameters.total


def test_the_request_covers_what_the_command_itself_needs(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m", hidden_size=512, intermediate_size=4096, vocab_size=40_000)
    config = load_model_config(folder)
    parts = part_bytes(config, torch.float32)
    needed = judging_bytes(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        layer_bytes=parts.layer,
        head_bytes=parts.head,
        embedding_bytes=parts.embedding,
    )
    shape = read_shape(json.loads((folder / "config.json").read_text()))
    requested, _ = memory(shape)
    assert 0 <= requested - PROCESS_BYTES - needed < 256 << 20
