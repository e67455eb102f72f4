"""What is found out about the way between ranks. The measurement itself runs on gloo in test_lost_ranks.py."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from millstream_runtime.distributed import nvlink
from millstream_runtime.distributed.probe import BANDWIDTH_BYTES, find_topology
from tests.support.thread_ranks import on_ranks


class FakeNvml:
    """A fake of NVIDIA's library: devices by UUID, and the pairs that NVLink joins."""

    def __init__(self, devices: list[str], joined: set[tuple[int, int]]) -> None:
        self._devices, self._joined = devices, joined
        self.is_open = False

    def nvmlInit_v2(self) -> int:  # noqa: N802 - NVIDIA's name
        self.is_open = True
        return 0

    def nvmlShutdown(self) -> int:  # noqa: N802
        self.is_open = False
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, device: Any) -> int:  # noqa: N802
        if uuid.decode() not in self._devices:
            return 6  # not found
        device._obj.value = self._devices.index(uuid.decode()) + 1
        return 0

    def nvmlDeviceGetP2PStatus(  # noqa: N802
        self, one: ctypes.c_void_p, other: ctypes.c_void_p, index: int, status: Any
    ) -> int:
        assert index == nvlink.P2P_CAPS_INDEX_NVLINK
        status._obj.value = 0 if ((one.value or 0) - 1, (other.value or 0) - 1) in self._joined else 1
        return 0


@pytest.mark.parametrize(
    ("uuids", "joined", "expected"),
    [
        (["GPU-a", "GPU-b", "GPU-c"], {(0, 1), (0, 2), (1, 2)}, True),
        (["GPU-a", "GPU-b", "GPU-c"], {(0, 1), (1, 2)}, False),
        (["GPU-a", "GPU-x"], {(0, 1)}, None),
    ],
)
def test_nvlink_must_join_every_pair(
    uuids: list[str], joined: set[tuple[int, int]], expected: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = FakeNvml(["GPU-a", "GPU-b", "GPU-c"], joined)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert nvlink.all_joined(uuids) is expected
    assert not library.is_open


def test_without_the_library_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert nvlink.all_joined(["GPU-a", "GPU-b"]) is None


def test_the_bandwidth_counts_what_each_rank_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 (n - 1) / n of the bytes, as NCCL's tests count: so that the number does not depend on n."""
    monkeypatch.setattr("millstream_runtime.distributed.probe.measure_allreduce", lambda *_: 0.5)

    def bandwidth(ranks: Any) -> torch.Tensor:
        found = find_topology(ranks, torch.device("cpu"))
        assert (found.link, found.peer_access, found.world_size) == ("Memory", None, ranks.size)
        return torch.tensor(found.allreduce_bytes_per_second)

    assert float(on_ranks(2, bandwidth)) == BANDWIDTH_BYTES["cpu"] * 1.0 / 0.5
    assert float(on_ranks(4, bandwidth)) == BANDWIDTH_BYTES["cpu"] * 1.5 / 0.5
