"""How a GPU's linear weights lie in memory, on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from millstream_runtime.engine.engine import Engine
from millstream_runtime.models.arithmetic import Arithmetic
from millstream_runtime.models.cpu.linear import CpuLayout
from millstream_runtime.models.linear.linear import DenseLinear, MemoryLayout, OutputMajorLayout, PlainLayout
from millstream_runtime.models.loading import weights
from millstream_runtime.models.memory_layouts import memory_layout_for
from tests.support.embedding import embedding_weight
from tests.support.engines import MakeEngine, generate, greedy, requests_for
from tests.support.family_cases import Models
from tests.support.tiny_families import prompts_of, reference_answers

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("device", "layout"), [("cpu", CpuLayout), ("meta", PlainLayout), ("cuda", OutputMajorLayout)], ids=str
)
def test_each_device_has_its_layout(device: str, layout: type[MemoryLayout]) -> None:
    found = memory_layout_for(torch.device(device), Arithmetic.of(torch.float32), 0)
    assert type(found) is layout
    assert found.is_output_major(1 << 20) == (device == "cuda")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("layouts"))


def linears_of(engine: Engine) -> list[DenseLinear]:
    """All that a model has, wherever they are."""
    found: list[DenseLinear] = []
    left: list[object] = [engine._runner._forward.model]
    while left:
        one = left.pop()
        if isinstance(one, DenseLinear):
            found.append(one)
        elif isinstance(one, list):
            left += one
        elif type(one).__module__.startswith("millstream_runtime.models"):
            names = getattr(one, "__slots__", None) or vars(one)
            left += [getattr(one, name) for name in names]
    return found


@pytest.mark.parametrize("family", ["llama-biases", "llama-ratio-5-tied", "phi3", "deepseek-v3"])
def test_weights_as_in_the_checkpoint_answer_alike(
    family: str, models: Models, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where outputs are reordered (rotations of DeepSeek), and where the head is the embedding."""
    folder: Path = models.folder(family)
    monkeypatch.setattr(weights, "memory_layout_for", lambda *arguments: OutputMajorLayout())
    engine = make_engine(folder)
    linears = linears_of(engine)
    assert len(linears) >= 4 * engine.model_config.num_layers
    assert all(one.weight.t().is_contiguous() for one in linears)
    if engine.model_config.tie_word_embeddings:
        embedding = embedding_weight(engine._runner._forward.model)
        assert any(one.weight.data_ptr() == embedding.data_ptr() for one in linears), "no copy"
    prompts = prompts_of((15, 18))
    answers = generate(engine, requests_for(prompts, greedy(6)))
    assert list(answers.values()) == reference_answers(models.reference(family), prompts, 6)


def test_outputs_are_reordered_in_the_order_of_memory() -> None:
    weight, bias = torch.arange(12.0).view(3, 4), torch.arange(4.0)
    order = [2, 0, 3, 1]
    for lying in (weight, weight.t().contiguous().t()):
        reordered = DenseLinear(lying, bias).reordered(order)
        assert isinstance(reordered, DenseLinear)
        assert reordered.weight.stride() == lying.stride()
        assert reordered.bias is not None
        assert torch.equal(reordered.weight, weight[:, order])
        assert torch.equal(reordered.bias, bias[order])
