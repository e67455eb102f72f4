"""When ranks sum by torch's symmetric memory, and what they then call. No GPU: the operation itself is a fake."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory

from millstream_runtime.distributed import process_group, symmetric_memory
from millstream_runtime.distributed.probe import choose_small_sums
from millstream_runtime.distributed.process_group import DistributedRanks
from millstream_runtime.distributed.symmetric_memory import MOST_BYTES, SWITCH, SymmetricSum, reason_against
from millstream_runtime.distributed.topology import Topology

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
JOINED: dict[str, Any] = {"link": "NVLink", "peer_access": True}


def topology(**found: Any) -> Topology:
    return Topology(2, "nccl", 2, allreduce_bytes_per_second=1e9, allreduce_latency_seconds=1e-5, **JOINED | found)


@pytest.mark.parametrize(
    ("device", "found", "switch", "reason"),
    [
        (CPU, {}, "1", "the ranks compute on a CPU"),
        (CUDA, {}, None, f"it was not measured on sm_90 yet; {SWITCH}=1 uses it"),
        (CUDA, {}, "0", f"{SWITCH} is 0"),
        (CUDA, {}, "1", None),
        (CUDA, {"peer_access": False}, "1", "a GPU cannot read another's memory"),
        (CUDA, {"link": "PCIe"}, "1", "NVLink does not join all GPUs: PCIe"),
        (CUDA, {"link": "Unknown"}, "1", "NVLink does not join all GPUs: Unknown"),
    ],
)
def test_what_decides_is_said(
    device: torch.device, found: dict[str, Any], switch: str | None, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.delenv(SWITCH, raising=False)
    if switch is not None:
        monkeypatch.setenv(SWITCH, switch)
    assert reason_against(topology(**found), device) == reason


def test_a_gpu_that_was_measured_needs_no_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(symmetric_memory, "MEASURED_CAPABILITIES", frozenset({90}))
    assert reason_against(topology(), CUDA) is None
    monkeypatch.setattr(symmetric_memory, "has_operation", lambda: False)
    assert reason_against(topology(), CUDA) == "this torch has no such sum"


def test_torch_has_the_operation_as_it_is_called() -> None:
    """Its module is not public: another torch may have another."""
    assert symmetric_memory.has_operation()
    schema = torch.ops.symm_mem.one_shot_all_reduce_copy_out.default._schema
    assert [str(one.type) for one in schema.arguments] == ["Tensor", "Tensor", "str", "str", "Tensor"]
    assert [one.name for one in schema.arguments][1:] == ["local_input", "reduce_op", "group_name", "out"]


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[DistributedRanks]:
    """A group of one rank, over gloo."""
    alone = process_group.join(0, 1, CPU, tmp_path / "store", 10.0)
    yield alone
    alone.leave()


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


class FakeMemory:
    """Torch's symmetric memory of two ranks, of which the other sends `others` times what this one sends."""

    def __init__(self, others: float) -> None:
        self.others = others
        self.joined: list[tuple[Tensor, str]] = []
        self.sums: list[tuple[Tensor, str, str]] = []

    def rendezvous(self, buffer: Tensor, group_name: str) -> None:
        self.joined.append((buffer, group_name))

    def sum(self, buffer: Tensor, local: Tensor, operation: str, group_name: str, out: Tensor) -> Tensor:
        assert buffer.shape == local.shape == out.shape
        assert buffer.dtype == local.dtype
        assert buffer.data_ptr() == self.joined[-1][0].data_ptr()
        buffer.copy_(local)
        self.sums.append((buffer, operation, group_name))
        return out.copy_(buffer + self.others * buffer)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> FakeMemory:
    fake = FakeMemory(others=0.0)
    monkeypatch.setattr(_symmetric_memory, "empty", torch.empty)
    monkeypatch.setattr(_symmetric_memory, "rendezvous", fake.rendezvous)
    monkeypatch.setattr(torch.ops.symm_mem, "one_shot_all_reduce_copy_out", fake.sum)
    return fake


def test_few_numbers_are_summed_by_symmetric_memory_and_the_rest_as_before(
    ranks: DistributedRanks, memory: FakeMemory
) -> None:
    assert ranks.use_for_small_sums(CPU, None) is None
    ((buffer, group_name),) = memory.joined
    assert (buffer.numel() * buffer.element_size(), group_name) == (MOST_BYTES, world().group_name)
    memory.others, memory.sums = 2.0, []
    partial = torch.ones(3, 8, dtype=torch.bfloat16)
    assert ranks.all_reduce(partial) is partial
    assert set(partial.flatten().tolist()) == {3.0}
    assert [(operation, name) for _, operation, name in memory.sums] == [("sum", group_name)]
    large = torch.ones(MOST_BYTES // 4 + 4)
    assert set(ranks.all_reduce(large).tolist()) == {1.0}
    with ranks.alone():
        assert ranks.all_reduce(torch.ones(8)).tolist() == [1.0] * 8
    assert len(memory.sums) == 1


@pytest.mark.parametrize(
    ("partial", "taken"),
    [
        (torch.zeros(MOST_BYTES // 4), True),
        (torch.zeros(MOST_BYTES // 4 + 4), False),
        (torch.zeros(8, dtype=torch.bfloat16), True),
        (torch.zeros(8, dtype=torch.float16), False),
        (torch.zeros(7, dtype=torch.bfloat16), False),
        (torch.zeros(16)[1:9], False),
        (torch.zeros(8, 8).t()[:, :4], False),
        (torch.zeros(0), False),
    ],
    ids=["largest", "too large", "bf16", "fp16", "no whole 16 bytes", "begins between", "strided", "empty"],
)
def test_what_is_taken(partial: Tensor, taken: bool, memory: FakeMemory, ranks: DistributedRanks) -> None:
    assert SymmetricSum(world(), CPU).takes(partial) is taken


def test_a_wrong_first_sum_leaves_all_as_it_was(ranks: DistributedRanks, memory: FakeMemory) -> None:
    memory.others = 1.0
    assert ranks.use_for_small_sums(CPU, None) == "its first sum was wrong"
    assert ranks.all_reduce(torch.ones(8)).tolist() == [1.0] * 8


def test_memory_that_cannot_be_shared_leaves_all_as_it_was(
    ranks: DistributedRanks, memory: FakeMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*tensor: object) -> None:
        raise RuntimeError("CUDA driver error: not permitted\nand more")

    monkeypatch.setattr(_symmetric_memory, "rendezvous", fails)
    assert ranks.use_for_small_sums(CPU, None) == "RuntimeError: CUDA driver error: not permitted"
    assert not memory.sums


def test_the_topology_says_what_sums_and_why(ranks: DistributedRanks) -> None:
    found = choose_small_sums(ranks, CPU, topology())
    assert (found.small_sums, found.small_sums_reason) == ("gloo", "the ranks compute on a CPU")
