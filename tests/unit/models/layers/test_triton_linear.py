"""A dense layer of few rows by our kernel and of many by torch, in the interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from millstream_kernels.linear.w16a16 import MAX_ROWS
from millstream_runtime.models.layers.triton_experts import triton_experts
from millstream_runtime.models.layers.triton_linear import triton_dense_linear
from millstream_runtime.models.linear.linear import DenseExperts
from millstream_runtime.models.loading.layer_kernels import RouterSpec
from tests.support.kernel_launches import recording_launches
from tests.support.triton_interpreter import interpreting


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    with interpreting():
        yield


def test_more_rows_than_the_kernel_takes_are_torchs() -> None:
    weight, bias, x = torch.randn(24, 72), torch.randn(24), torch.randn(MAX_ROWS + 1, 72)
    linear = triton_dense_linear(weight.t(), bias)
    assert linear is not None
    for num_rows, kernels in ((MAX_ROWS, ["w16a16_product"]), (MAX_ROWS + 1, [])):
        rows, residual = x[:num_rows], torch.randn(num_rows, 24)
        with recording_launches() as launches:
            found = linear(rows)
        assert [launch.kernel for launch in launches] == kernels
        torch.testing.assert_close(found, rows @ weight.t() + bias)
        added = residual.clone()
        linear.add_to(added, rows)
        torch.testing.assert_close(added, residual + found)


def test_rows_that_lie_otherwise_are_copied_first() -> None:
    weight = torch.randn(24, 72)
    linear = triton_dense_linear(weight.t(), None)
    assert linear is not None
    for x in (torch.randn(72, 3).t(), torch.randn(3, 75)[:, :72]):
        torch.testing.assert_close(linear(x), x @ weight.t())


def test_outputs_change_their_order_and_a_bias_goes() -> None:
    weight, bias, x = torch.randn(3, 16), torch.randn(3), torch.randn(2, 16)
    linear = triton_dense_linear(weight.t(), bias)
    assert linear is not None
    with recording_launches() as launches:
        assert torch.equal(linear.reordered([2, 0, 1])(x), linear(x)[:, [2, 0, 1]])
        assert torch.equal(linear.without_bias()(x) + bias, linear(x))
    assert len(launches) == 4


def test_a_weight_that_the_kernel_does_not_take_is_left_to_the_memory_layout() -> None:
    assert triton_dense_linear(torch.randn(72, 24), None) is None, "[in, out] in memory"
    assert triton_dense_linear(torch.randn(24, 12).t(), None) is None
    assert triton_dense_linear(torch.randn(0, 16).t(), None) is None, "a rank without tokens of the vocabulary"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_router_of_the_models_type_is_such_a_product_too(dtype: torch.dtype) -> None:
    """One of another type is torch's, as DeepSeek's of float32 is next to weights of bfloat16."""
    experts = [DenseExperts(torch.randn(4, *sizes) * 0.1) for sizes in ((32, 32), (16, 32))]
    router = RouterSpec(torch.randn(4, 32).to(dtype), top_k=2, normalise=True)
    x, found = torch.randn(3, 32), []
    for dense_router in (False, True):
        add = triton_experts(router, *experts, dense_router=dense_router)
        assert add is not None
        residual = torch.zeros(3, 32)
        with recording_launches() as launches:
            add(residual, x)
        found.append(residual)
        by_kernel = "w16a16_product" in {launch.kernel for launch in launches}
        assert by_kernel == (dense_router and dtype == torch.float32)
    torch.testing.assert_close(*found)
