"""What the kernels change of memory: rows have no regions, steps copy nothing, and steps are measured as they run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from millstream_runtime.config import Device, RuntimeConfig
from millstream_runtime.engine import assembly
from millstream_runtime.engine.execution import rank_kernels, shard
from millstream_runtime.engine.execution.execution_mode import Execution
from millstream_runtime.engine.execution.graphs.buckets import Bucket
from millstream_runtime.engine.execution.kernel_choice import ATTENTION_PARTS
from millstream_runtime.engine.execution.shard_config import resolve_shard_config
from millstream_runtime.engine.kernel_backends import Backend, KernelChoice
from millstream_runtime.engine.kv.pool_size import MemoryBudget
from millstream_runtime.engine.request import Request
from millstream_runtime.models.linear.tensor_parallel import SINGLE_PROCESS
from millstream_runtime.models.registry import load_model_config
from tests.support.engines import MakeEngine, WriteModel, greedy
from tests.support.kernel_launches import Launch, recording_launches
from tests.support.triton_interpreter import interpreting

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def launches() -> Iterator[list[Launch]]:
    with interpreting(), recording_launches() as recorded:
        yield recorded


@pytest.fixture
def attention_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """All else is torch's: interpreting one program per row of a prompt takes seconds."""
    monkeypatch.setattr(rank_kernels, "layer_kernels", lambda *chosen: None)
    monkeypatch.setattr(assembly, "sampler_kernels", lambda choices: None)


@pytest.fixture
def folder(write_model: WriteModel) -> Path:
    return write_model(hidden_size=64)


@pytest.mark.parametrize(
    ("device", "backend", "expected"),
    [("cuda", Backend.TORCH, True), ("cuda", Backend.TRITON, False), ("cpu", Backend.TORCH, False)],
)
def test_rows_have_regions_where_torch_attends_on_a_gpu(device: str, backend: Backend, expected: bool) -> None:
    kernels = tuple(KernelChoice(part, backend, "") for part in ATTENTION_PARTS)
    assert assembly.has_regions(kernels, torch.device(device)) is expected


@pytest.mark.usefixtures("attention_alone", "launches")
@pytest.mark.parametrize("backend", [Backend.TRITON, Backend.TORCH], ids=["kernels", "a CPU"])
def test_without_regions_blocks_are_taken_as_they_come(backend: Backend, folder: Path, make_engine: MakeEngine) -> None:
    """One place is as good as another where block tables are read. The shorter prompt is admitted first."""
    engine = make_engine(folder, execution=Execution(backend=backend))
    for index, length in enumerate((17, 1)):
        engine.add_request(Request(str(index), [3] * length, greedy(2)))
    engine.step()
    assert [engine._sequences[name].block_table for name in ("0", "1")] == [[1, 2], [0]]


@pytest.mark.usefixtures("attention_alone")
def test_memory_is_measured_with_the_attention_that_steps_will_have(
    folder: Path, launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And kept for graphs: the kernels copy no keys and values."""
    gigabyte = 1 << 30
    for name, value in {
        "reset_peak_memory_stats": None,
        "memory_allocated": gigabyte,
        "max_memory_allocated": 3 * gigabyte,
        "synchronize": None,
        "empty_cache": None,
        "mem_get_info": (70 * gigabyte, 80 * gigabyte),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *device, value=value: value)
    config = RuntimeConfig(
        model=str(folder), served_model_name="t", device=Device.CPU, max_num_batched_tokens=20, max_num_seqs=4
    )
    shard_config = resolve_shard_config(config)
    model = shard.load(config, shard_config)

    def budget(backend: Backend, *, with_graphs: bool) -> MemoryBudget:
        kernels = [KernelChoice(part, backend, "") for part in ATTENTION_PARTS]
        return shard._cuda_budget(config, shard_config, model, SINGLE_PROCESS, kernels, with_graphs=with_graphs)

    torch_graphs = budget(Backend.TORCH, with_graphs=True).reserve_bytes
    assert not launches
    eager = budget(Backend.TRITON, with_graphs=False)
    assert {launch.kernel for launch in launches} == {"paged_prefill"}
    assert eager.activations_bytes == 2 * gigabyte
    assert eager.available_bytes == 80 * gigabyte * config.gpu_memory_utilization_percent // 100 - 12 * gigabyte
    kernel_graphs = budget(Backend.TRITON, with_graphs=True).reserve_bytes
    assert eager.reserve_bytes < kernel_graphs < torch_graphs


def test_a_padded_step_of_kernels_keeps_partial_sums_and_copies_nothing(folder: Path) -> None:
    """The shape of Llama-3.1-8B: 32 heads of 128, a float32 of each for every 512 tokens."""
    config = RuntimeConfig(model=str(folder), served_model_name="t", max_num_seqs=256)
    shape = replace(
        load_model_config(folder), num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, max_model_len=131_072
    )
    copied_bytes = 32 * 2 * 8 * 128 * 2 * 16
    assert shard._padded_step_bytes(config, shape, copied_bytes, Backend.TORCH) == copied_bytes
    kept_bytes = shard._padded_step_bytes(config, shape, copied_bytes, Backend.TRITON)
    assert kept_bytes == 32 * 32 * 130 * 4 * 16 // 512
    buckets = {
        taken: shard._buckets(config, shape, taken, shape.max_model_len, 127 << 30).holding(256, 8192)
        for taken in (copied_bytes, kept_bytes)
    }
    assert buckets == {copied_bytes: None, kept_bytes: Bucket(256, 8192)}
