"""The float16 copy of a weight: made only where it loses nothing, and equal to the float32 product where it is used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from millstream_runtime.models.half_weights import MOST_ELEMENTS, MOST_ROWS, half_copy
from millstream_runtime.models.linear import Linear
from millstream_runtime.models.registry import load_model, load_model_config

DEMO_MODEL = Path(__file__).resolve().parents[3] / "models" / "demo-chat"

pytestmark = pytest.mark.skipif(
    not torch.backends.cpu.get_cpu_capability().startswith("AVX"), reason="FBGEMM's float16 product needs AVX2"
)


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def weight(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(6)
    return (torch.randn(rows, columns, generator=generator) * 0.05).to(dtype).float()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 7, 16, MOST_ROWS, MOST_ROWS + 1])
@pytest.mark.usefixtures("one_thread")
def test_products_are_those_of_the_float32_weight(rows: int, has_bias: bool) -> None:
    matrix = weight(51, 37)
    bias = torch.randn(37) if has_bias else None
    half = half_copy(matrix)
    assert half is not None
    plain, halved = Linear(matrix, bias), Linear(matrix, bias, half)
    x = torch.randn(rows, 2, 51).select(1, 0)  # a strided view, as a norm gives it
    torch.testing.assert_close(halved(x), plain(x), rtol=1e-5, atol=1e-6)
    one, other = torch.randn(2, rows, 37).unbind(0)
    other.copy_(one)
    plain.add_to(one, x)
    halved.add_to(other, x)
    torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


def test_a_weight_that_float16_does_not_hold_has_no_copy() -> None:
    assert half_copy(weight(64, 64, torch.float32)) is None  # trained in float32: 24 significant bits
    assert half_copy(weight(64, 64) * 2.0**20) is None  # beyond the largest float16
    assert half_copy(weight(64, 64) * 2.0**-12) is None  # most of it below the smallest normal one
    assert half_copy(weight(64, 64).double()) is None
    assert half_copy(weight(MOST_ELEMENTS // 64 + 1, 64)) is None


def test_the_few_tiny_weights_of_a_bfloat16_checkpoint_may_be_rounded() -> None:
    matrix = weight(64, 64)
    matrix[0, 0] = 2.0**-24 * 1.4921875
    assert matrix[0, 0] != matrix[0, 0].half()
    assert half_copy(matrix) is not None


def test_copies_take_the_room_that_they_are_given_and_no_more() -> None:
    """The KV pool needs its part of the memory: a copy that does not fit is left out; those that do are counted."""

    def weight_bytes(room_bytes: int) -> int:
        config = load_model_config(DEMO_MODEL)
        device = torch.device("cpu")
        return load_model(config, DEMO_MODEL, torch.float32, device, room_for_copies_bytes=room_bytes).weight_bytes

    none, some, all_of_them = (weight_bytes(room) for room in (0, 1_000_000, 1 << 30))
    assert none < some <= none + 1_000_000 < all_of_them < 3 * none
