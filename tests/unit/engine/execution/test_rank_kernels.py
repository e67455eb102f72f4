"""Two ranks compute with the kernels that rank 0 chose, in the interpreter, and with none that one cannot start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from millstream_runtime.distributed.leader import Leader
from millstream_runtime.engine.execution import model_loading
from millstream_runtime.engine.execution.execution_mode import Execution
from millstream_runtime.engine.execution.rank_kernels import agree, lies_for
from millstream_runtime.engine.kernel_backends import Backend, KernelChoice
from tests.support import recording_follower
from tests.support.eager_recorder import EagerRecorder
from tests.support.engines import MakeEngine, WriteModel, generate, greedy, requests_for
from tests.support.family_cases import dense
from tests.support.kernel_launches import recording_launches
from tests.support.tiny_families import write_family
from tests.support.triton_interpreter import interpreting

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.deep]
TORCH, TRITON = Backend.TORCH, Backend.TRITON


def choices(**triton: str) -> tuple[KernelChoice, ...]:
    """Of three parts; those named are Triton's, the others torch's. Each with a reason."""
    parts = ("attention", "static_decode", "norm")
    return tuple(KernelChoice(part, TRITON if part in triton else TORCH, triton.get(part, "")) for part in parts)


@pytest.mark.quick
def test_what_another_rank_cannot_start_is_torchs_with_its_reason() -> None:
    wanted = choices(attention="taken", norm="taken")
    refusing = (KernelChoice("norm", TORCH, "out of shared memory"), *wanted[:2])
    agreed = agree([wanted, refusing, refusing])
    assert agreed == (*wanted[:2], KernelChoice("norm", TORCH, "rank 1: out of shared memory"))
    assert agree([wanted]) == wanted
    assert not lies_for(agreed, wanted), "its weights lie for a kernel"
    assert lies_for(agreed, refusing)
    assert lies_for(choices(norm="taken"), wanted), "weights lie alike for any attention"


def test_all_ranks_use_the_kernels_that_rank_0_chose_and_none_that_one_cannot_start(
    write_model: WriteModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = write_model(hidden_size=64)
    requests = requests_for([[5, 17, 80, 3, 9], [4]], greedy(4))
    expected = generate(make_engine(folder), requests)
    monkeypatch.setenv(recording_follower.KERNELS, str(tmp_path))
    leader = Leader(2, torch.device("cpu"), follower_module=recording_follower.MODULE)
    wanted = choices(attention="taken", static_decode="taken", norm="taken")
    monkeypatch.setattr(model_loading, "choose_kernels", lambda *arguments: wanted)

    def kernels_of(execution: Execution) -> tuple[KernelChoice, ...]:
        engine = make_engine(folder, rank_group=leader, execution=execution, tensor_parallel_size=2)
        assert generate(engine, requests) == expected
        return engine.kernels

    with interpreting(), recording_launches() as launches:
        assert kernels_of(Execution(overlapped=True)) == wanted
        kernels = {launch.kernel for launch in launches}
        assert kernels > {"rms_norm_row", "paged_decode"}
        (tmp_path / "refused").write_text("norm")  # weights lie for it: all ranks load again
        launches.clear()
        norm = KernelChoice("norm", TORCH, "rank 1: out of shared memory")
        assert kernels_of(Execution(EagerRecorder())) == (*wanted[:2], norm)
        assert {launch.kernel for launch in launches} == kernels - {"rms_norm_row"}
    leader.close()
    assert {*(tmp_path / "launched").read_text().split()} == kernels


def test_ranks_with_experts_of_kernels_have_graphs(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "experts"
    sizes = {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
    write_family(folder, **dense("mixtral", num_hidden_layers=1, **sizes))
    requests = requests_for([[5, 17, 80, 3, 9], [4]], greedy(4))
    expected = generate(make_engine(folder), requests)
    monkeypatch.setenv(recording_follower.KERNELS, str(tmp_path))
    leader = Leader(2, torch.device("cpu"), follower_module=recording_follower.MODULE)
    backend = TRITON
    monkeypatch.setattr(model_loading, "choose_kernels", lambda *arguments: (KernelChoice("experts", backend, ""),))
    monkeypatch.setattr(model_loading, "choose", lambda config, device: Execution(EagerRecorder(), overlapped=True))
    two_ranks = {"rank_group": leader, "tensor_parallel_size": 2, "max_num_seqs": 2}
    with interpreting():
        engine = make_engine(folder, **two_ranks)
        assert generate(engine, requests) == expected
        assert engine.graphs is not None
        assert (engine.graphs.num_refused, engine.graphs.replayed_steps > 0) == (0, True)
        backend = TORCH
        engine = make_engine(folder, **two_ranks)
        assert generate(engine, requests) == expected
        assert engine.graphs is None
    leader.close()
