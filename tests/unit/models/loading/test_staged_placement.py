"""Tensors reach a device whole through a small ring of buffers, and what is not finite is named.

A GPU's copies run behind the host's back. Here they run as late as they may: a buffer that is filled again too soon, or
a tensor that is used before it is there, shows as other numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.models import registry
from millstream_runtime.models.loading import staged_placement
from millstream_runtime.models.loading.staged_placement import StagedPlacement
from tests.support.engines import MakeEngine, WriteModel, generate, greedy, requests_for

CPU = torch.device("cpu")
BUFFER_BYTES, NUM_BUFFERS = 1000, 3


class LateCopies:
    """`Copies` that run when somebody waits for them, and no sooner. `most`: copies under way at once."""

    def __init__(self) -> None:
        self.allocated_bytes = self.most = 0
        self._queue: deque[tuple[Tensor, Tensor]] = deque()
        self._num_done = 0

    def buffer(self, num_bytes: int) -> Tensor:
        self.allocated_bytes += num_bytes
        return torch.full((num_bytes,), 0x5A, dtype=torch.uint8)

    def begin(self) -> None:
        return

    def copy(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        self._queue.append((target, source))
        self.most = max(self.most, len(self._queue))
        number = self._num_done + len(self._queue)

        def wait() -> None:
            while self._num_done < number:
                self._run()

        return wait

    def join(self) -> None:
        while self._queue:
            self._run()

    def _run(self) -> None:
        target, source = self._queue.popleft()
        target.copy_(source)
        self._num_done += 1


def staged(copies: LateCopies) -> StagedPlacement:
    return StagedPlacement(CPU, copies, buffer_bytes=BUFFER_BYTES, num_buffers=NUM_BUFFERS)


@pytest.fixture
def small_ring(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateCopies]:
    copies = LateCopies()
    monkeypatch.setattr(registry, "placement_for", lambda device: staged(copies))
    yield copies
    assert copies.allocated_bytes == BUFFER_BYTES * NUM_BUFFERS, "however large a tensor is"


TENSORS = {
    "several times the ring": torch.arange(5000, dtype=torch.float32).view(50, 100),
    "of 16 bits, no multiple of a buffer": torch.randn(77, 13, dtype=torch.bfloat16),
    "transposed": torch.randn(40, 30).t(),
    "packed": torch.randint(-(2**31), 2**31 - 1, (30, 9), dtype=torch.int32),
    "of 8 bits": torch.randn(50, 50).to(torch.float8_e4m3fn),
    "one number": torch.tensor(2.5),
    "nothing": torch.empty(0, 4),
}


def test_every_tensor_arrives_whole() -> None:
    copies = LateCopies()
    with staged(copies) as placement:
        for _ in range(3):
            for name, tensor in TENSORS.items():
                placed = placement.place(name, tensor)
                assert (placed.dtype, placed.shape) == (tensor.dtype, tensor.shape), name
                assert torch.equal(placed.float(), tensor.float()), name
        placement.finish()
    assert 1 < copies.most <= NUM_BUFFERS, "copies run while later pieces are read"


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        (torch.tensor([1.0, float("inf")]), "NaN or infinite"),
        (torch.tensor([float("nan")], dtype=torch.float16), "NaN or infinite"),
        (torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn), "NaN"),
    ],
)
def test_the_first_tensor_that_is_not_finite_is_named_when_checks_are_read(tensor: Tensor, kind: str) -> None:
    with staged(LateCopies()) as placement:
        placement.place("good", torch.ones(3))
        placement.place("bad", tensor)
        placement.place("worse", tensor)
        with pytest.raises(RuntimeFailure, match=rf"^Tensor bad holds {kind} values; the checkpoint") as caught:
            placement.finish()
    assert caught.value.reason is FailureReason.CHECKPOINT_INVALID


def test_checks_are_read_for_many_tensors_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_placement, "MOST_UNCHECKED", 3)
    with staged(LateCopies()) as placement:
        placement.place("bad", torch.tensor([float("nan")]))
        placement.place("good", torch.ones(1))
        with pytest.raises(RuntimeFailure, match="Tensor bad "):
            placement.place("third", torch.ones(1))


def test_a_model_that_was_loaded_so_answers_alike(
    write_model: WriteModel, make_engine: MakeEngine, small_ring: LateCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = generate(make_engine(write_model()), requests_for([[5, 17, 80], [4]], greedy(8)))
    assert small_ring.most > 1
    monkeypatch.undo()
    assert found == generate(make_engine(write_model()), requests_for([[5, 17, 80], [4]], greedy(8)))


def test_a_damaged_weight_is_named_as_it_is_without_the_ring(
    write_model: WriteModel, make_engine: MakeEngine, small_ring: LateCopies, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((write_model() / "config.json").read_bytes())
    tensors = load_file(write_model() / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][70, 3] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeFailure, match=r"^Tensor model\.layers\.1\.mlp\.up_proj\.weight of .* holds NaN"):
        make_engine(tmp_path)
