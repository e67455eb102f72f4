"""The float16 copy of a weight: made only where it loses nothing, and equal to the float32 product where it is used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from millstream_runtime.models.cpu.half_weights import MOST_ROWS, MOST_ROWS_OF_SMALL, SMALL_ELEMENTS, half_copy
from millstream_runtime.models.cpu.linear import CpuLinear
from millstream_runtime.models.registry import load_model, load_model_config

DEMO_MODEL = Path(__file__).resolve().parents[4] / "models" / "demo-chat"

pytestmark = pytest.mark.skipif(
    not torch.backends.cpu.get_cpu_capability().startswith("AVX"), reason="FBGEMM's float16 product needs AVX2"
)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def weight(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(6)
    return (torch.randn(rows, columns, generator=generator) * 0.05).to(dtype).float()


@pytest.mark.matrix("size")
@pytest.mark.parametrize(("all_threads", "threads"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("size", [(51, 37), (600, 700), (1030, 1031)], ids=str)
def test_products_are_those_of_the_float32_weight(
    size: tuple[int, int], has_bias: bool, all_threads: int, threads: int
) -> None:
    """Of small weights and large ones, by as many threads as the step has or more."""
    torch.set_num_threads(all_threads)
    matrix = weight(*size)
    bias = torch.randn(size[1]) if has_bias else None
    half = half_copy(matrix)
    assert half is not None
    plain, halved = CpuLinear(matrix, bias), CpuLinear(matrix, bias, half)
    torch.set_num_threads(threads)
    for rows in (0, 1, 2, 7, MOST_ROWS + 1, 16, MOST_ROWS_OF_SMALL, MOST_ROWS_OF_SMALL + 1):
        x = torch.randn(rows, 2, size[0]).select(1, 0)  # a strided view, as a norm gives it
        torch.testing.assert_close(halved(x), plain(x), rtol=1e-4, atol=1e-5)
        one, other = torch.ones(2, rows, size[1]).unbind(0)
        plain.add_to(one, x)
        halved.add_to(other, x)
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)
    assert torch.get_num_threads() == threads, "what a product takes, it gives back"


def test_few_rows_of_any_weight_and_more_of_a_small_one_are_for_the_copy() -> None:
    small, large = half_copy(weight(64, 64)), half_copy(weight(SMALL_ELEMENTS // 64 + 1, 64))
    assert small is not None
    assert large is not None
    for rows in (1, MOST_ROWS, MOST_ROWS + 1, MOST_ROWS_OF_SMALL, MOST_ROWS_OF_SMALL + 1):
        assert (small.product(torch.randn(rows, 64)) is not None) == (rows <= MOST_ROWS_OF_SMALL)
        assert (large.product(torch.randn(rows, SMALL_ELEMENTS // 64 + 1)) is not None) == (rows <= MOST_ROWS)


def test_a_weight_that_float16_does_not_hold_has_no_copy() -> None:
    assert half_copy(weight(64, 64, torch.float32)) is None  # trained in float32: 24 significant bits
    assert half_copy(weight(64, 64) * 2.0**20) is None  # beyond the largest float16
    assert half_copy(weight(64, 64) * 2.0**-12) is None  # most of it below the smallest normal one
    assert half_copy(weight(64, 64).double()) is None
    late = torch.cat([weight(640, 64), weight(64, 64, torch.float32)])
    assert half_copy(late) is None  # which its first elements do not tell


def test_without_its_products_there_is_no_copy() -> None:
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "qnnpack"  # as on a machine without FBGEMM
    try:
        assert half_copy(weight(64, 64)) is None
    finally:
        torch.backends.quantized.engine = before
    assert half_copy(weight(64, 64)) is not None


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
        return load_model(config, DEMO_MODEL, torch.float32, device, copy_budget_bytes=room_bytes).weight_bytes

    none, some, all_of_them = (weight_bytes(room) for room in (0, 1_000_000, 1 << 30))
    assert none < some <= none + 1_000_000 < all_of_them <= 3 * none
