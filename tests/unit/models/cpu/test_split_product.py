"""Products of few rows in parts: the same numbers, and parts only where they help."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from millstream_runtime.models.cpu.linear import CpuLinear
from millstream_runtime.models.cpu.split_product import LEAST_PART_ELEMENTS, MOST_ROWS, num_parts, split_product


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [1, 2, 5, MOST_ROWS])
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_parts_add_up_to_the_product(rows: int, parts: int) -> None:
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(48, 40, generator=generator, dtype=torch.float64)
    wide = torch.randn(rows, 96, generator=generator, dtype=torch.float64)
    for x in (wide[:, :48].contiguous(), wide[:, 48:]):  # a view of rows that lie apart too
        torch.testing.assert_close(split_product(x, weight, parts), x @ weight, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(split_product(x, weight.t().contiguous().t(), parts), x @ weight)


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_linear_layer_gives_the_same_on_two_threads_as_on_one(has_bias: bool) -> None:
    weight, bias = torch.randn(512, 640), torch.randn(640) if has_bias else None
    x, residual = torch.randn(3, 512), torch.randn(3, 640)
    linear, results = CpuLinear(weight, bias), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert num_parts(x, weight) == threads
        added = residual.clone()
        linear.add_to(added, x)
        results.append((linear(x), added))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)  # sums in another order


def test_it_is_cut_only_for_few_rows_of_a_large_float32_matrix_on_several_threads() -> None:
    torch.set_num_threads(2)
    large, small = torch.zeros(512, 2 * LEAST_PART_ELEMENTS // 512), torch.zeros(512, LEAST_PART_ELEMENTS // 512)
    assert num_parts(torch.zeros(1, 512), large) == 2
    assert num_parts(torch.zeros(MOST_ROWS + 1, 512), large) == 1
    assert num_parts(torch.zeros(1, 512), small) == 1
    assert num_parts(torch.zeros(1, 512).double(), large.double()) == 1
    assert num_parts(torch.zeros(1, 511), torch.zeros(511, 512)) == 1, "511 rows are not cut in two"
    torch.set_num_threads(1)
    assert num_parts(torch.zeros(1, 512), large) == 1
