"""CUDA graphs of models with experts: where kernels compute all of them, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from millstream_runtime.engine.execution import model_loading, rank_kernels
from millstream_runtime.engine.execution.execution_mode import Execution
from millstream_runtime.engine.execution.kernel_choice import backend_of
from millstream_runtime.engine.kernel_backends import Backend, KernelChoice
from millstream_runtime.engine.request import Request
from millstream_runtime.models.layers.triton_layers import TritonLayers
from tests.support.engines import MakeEngine, generate, greedy
from tests.support.family_cases import MLA, dense
from tests.support.kernel_launches import Launch, recording_launches
from tests.support.kernel_tape import KernelTapeRecorder
from tests.support.tiny_families import prompts_of, write_family
from tests.support.triton_interpreter import interpreting

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.deep]
EXPERTS = TritonLayers(norms=False, activations=False, linears=False, rotates=False, experts=True)
ONE_LAYER = {"num_hidden_layers": 1, "first_k_dense_replace": 0}
FEW = [Request(str(index), prompt, greedy(3)) for index, prompt in enumerate(prompts_of((1, 9)))]


@pytest.fixture
def launches() -> Iterator[list[Launch]]:
    with interpreting(), recording_launches() as recorded:
        yield recorded


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine chooses there, with kernels for experts alone: interpreting all takes seconds."""
    on_a_gpu = Execution(KernelTapeRecorder(), overlapped=True, backend=Backend.TRITON)
    monkeypatch.setattr(model_loading, "choose", lambda config, device: on_a_gpu)

    def layers(choices: tuple[KernelChoice, ...], device: torch.device, dtype: torch.dtype) -> TritonLayers | None:
        return EXPERTS if backend_of("experts", choices) is Backend.TRITON else None

    monkeypatch.setattr(rank_kernels, "layer_kernels", layers)


def test_a_graph_holds_experts_of_kernels(tmp_path: Path, make_engine: MakeEngine, launches: list[Launch]) -> None:
    """Nothing of a step is left on the host: the tape of another step computes it."""
    write_family(tmp_path, **dense("deepseek_v3", **MLA | ONE_LAYER))
    expected = generate(make_engine(tmp_path, execution=Execution()), FEW)
    assert not launches
    engine = make_engine(tmp_path, max_num_seqs=2)
    assert generate(engine, FEW) == expected
    assert engine.graphs is not None
    assert (engine.graphs.num_refused, engine.graphs.eager_steps) == (0, 0)
    assert engine.graphs.replayed_steps > 0
    assert "expert_product" in {launch.kernel for launch in launches}


def test_experts_that_the_kernels_do_not_take_are_torchs_and_have_no_graphs(
    tmp_path: Path, make_engine: MakeEngine, launches: list[Launch]
) -> None:
    write_family(tmp_path, **dense("deepseek_v3", **MLA | ONE_LAYER | {"moe_intermediate_size": 12}))
    expected = generate(make_engine(tmp_path, execution=Execution()), FEW)
    engine = make_engine(tmp_path)
    assert generate(engine, FEW) == expected
    assert engine.graphs is None
    experts = KernelChoice("experts", Backend.TORCH, "the kernels do not take the experts of a layer")
    assert experts in engine.kernels
    assert not {launch.kernel for launch in launches} & {"route_token", "expert_product"}
