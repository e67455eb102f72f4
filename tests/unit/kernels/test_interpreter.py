"""The mended interpreter computes what a GPU does: without this, a test of a kernel proves nothing."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from tests.support.triton_interpreter import interpreting

pytestmark = pytest.mark.usefixtures("interpreter")
TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@triton.jit
def cast(source, target, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(target + at, tl.load(source + at).to(target.dtype.element_ty))


@triton.jit
def multiply_matrices(left, right, target, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(left + m[:, None] * K + k[None, :])
    b = tl.load(right + k[:, None] * N + n[None, :])
    tl.store(target + m[:, None] * N + n[None, :], tl.dot(a, b))


@triton.jit
def combine(left, right, target, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    a, b = tl.load(left + at), tl.load(right + at)
    tl.store(target + at, a * b + a - b)
    tl.store(target + SIZE + at, tl.where(a < b, a, b))
    tl.store(target + 2 * SIZE + at, tl.maximum(a, b))


@triton.jit
def sum_of_rows(source, target, rows, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    total = tl.zeros((SIZE,), tl.float32)
    for row in range(tl.load(rows)):
        total += tl.load(source + row * SIZE + at).to(tl.float32)
    tl.store(target + at, total)


@triton.jit
def largest_of_rows(source, target, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    numbers = tl.load(source + at[:, None] * SIZE + at[None, :])
    tl.store(target + at, tl.max(numbers, 1) + tl.sum(numbers, 1))


@triton.jit
def scale_index(source, target, stride):
    tl.store(target, tl.load(source) * stride)


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.matrix
@pytest.mark.parametrize("source", TYPES, ids=str)
@pytest.mark.parametrize("target", TYPES, ids=str)
def test_a_cast_is_torchs(source: torch.dtype, target: torch.dtype) -> None:
    wide = torch.cat(
        [numbers(1, 1000) * 2.0 ** numbers(2, 1000).mul(4), torch.zeros(22), torch.tensor([torch.nan, -0.0])]
    )
    given = wide.clamp(-400, 400).to(source)
    result = torch.empty(1024, dtype=target)
    cast[(1,)](given, result, SIZE=1024)
    assert torch.equal(bits(result), bits(given.float().to(target)))


def bits(x: torch.Tensor) -> torch.Tensor:
    """Bits, with one NaN for all."""
    return x.float().nan_to_num(nan=1e30).view(torch.int32)


def test_a_cast_to_float8_saturates_as_on_a_gpu() -> None:
    given = torch.tensor([1e6, -1e6, 449.0, 448.0, torch.inf, -torch.inf, torch.nan, 0.0])
    result = torch.empty(8, dtype=torch.float8_e4m3fn)
    cast[(1,)](given, result, SIZE=8)
    assert result.float().nan_to_num(nan=-1).tolist() == [448, -448, 448, 448, 448, -448, -1, 0]


@pytest.mark.parametrize("given", [[-2.5, 7.0, 0.0, 300.0], [1.0, 2.0, 3.0, 4.0]])
def test_integers_become_bfloat16_and_back(given: list[float]) -> None:
    whole, result = torch.tensor(given).to(torch.int32), torch.empty(4, dtype=torch.bfloat16)
    cast[(1,)](whole, result, SIZE=4)
    assert torch.equal(result, whole.bfloat16())
    back = torch.empty(4, dtype=torch.int32)
    cast[(1,)](torch.tensor(given, dtype=torch.bfloat16), back, SIZE=4)
    assert torch.equal(back, torch.tensor(given).to(torch.bfloat16).to(torch.int32))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_dot_sums_in_float32(dtype: torch.dtype) -> None:
    left, right = numbers(3, 16, 64).to(dtype), numbers(4, 64, 32).to(dtype)
    result = torch.empty(16, 32)
    multiply_matrices[(1,)](left, right, result, M=16, N=32, K=64)
    expected = left.double() @ right.double()
    assert (result - expected).abs().max() <= 2e-6 * (left.double().abs() @ right.double().abs()).max()


@pytest.mark.parametrize("dtype", TYPES[:3], ids=str)
def test_arithmetic_rounds_after_each_operation(dtype: torch.dtype) -> None:
    left, right = numbers(5, 256).to(dtype), numbers(6, 256).to(dtype)
    result = torch.empty(3, 256, dtype=dtype)
    combine[(1,)](left, right, result, SIZE=256)
    assert torch.equal(result, torch.stack([left * right + left - right, left.minimum(right), left.maximum(right)]))


def test_a_maximum_with_nan_is_the_number() -> None:
    left, right = torch.tensor([torch.nan, 1.0, torch.nan, 2.0]), torch.tensor([3.0, torch.nan, torch.nan, 1.0])
    result = torch.empty(3, 4)
    combine[(1,)](left, right, result, SIZE=4)
    assert result[2].nan_to_num(nan=-1).tolist() == [3, 1, -1, 2]


def test_a_loop_has_a_bound_that_is_loaded() -> None:
    source, result = numbers(7, 5, 16), torch.empty(16)
    for rows in (0, 1, 4):
        sum_of_rows[(1,)](source, result, torch.tensor([rows], dtype=torch.int32), SIZE=16)
        torch.testing.assert_close(result, source[:rows].sum(0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", TYPES[:2], ids=str)
def test_reductions_are_of_the_numbers(dtype: torch.dtype) -> None:
    source, result = numbers(8, 16, 16).to(dtype), torch.empty(16)
    largest_of_rows[(1,)](source, result, SIZE=16)
    expected = source.float().amax(1) + source.float().sum(1)
    torch.testing.assert_close(result, expected, rtol=1e-2 if dtype == torch.float16 else 1e-5, atol=1e-2)


def test_a_reduction_that_rounds_in_each_step_is_refused() -> None:
    with pytest.raises(InterpreterError, match="float32 first"):
        largest_of_rows[(1,)](numbers(8, 16, 16).bfloat16(), torch.empty(16), SIZE=16)


def test_an_overflow_of_int32_wraps_and_is_an_error_where_asked() -> None:
    large, result = torch.tensor([1 << 20], dtype=torch.int32), torch.empty(1, dtype=torch.int32)
    scale_index[(1,)](large, result, 1 << 12)
    assert result.item() == 0
    with interpreting(checking_overflow=True), pytest.raises(InterpreterError, match="overflow"):
        scale_index[(1,)](large, result, 1 << 12)


def test_triton_is_as_before_when_the_block_ends() -> None:
    with interpreting():
        cast[(1,)](numbers(9, 8), torch.empty(8), SIZE=8)
        during = tl.load
    assert tl.load is during
    assert tl.core.is_builtin(tl.load)
    assert not triton.knobs.runtime.interpret
