"""The check of oneDNN's bfloat16 product lets a right one pass, and catches each kind of wrong one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from millstream_kernels.cpu.bfloat16 import check as bfloat16_check
from millstream_kernels.cpu.bfloat16.check import SHAPES, checked
from millstream_kernels.cpu.bfloat16.product import MANY_INPUTS, OneDNN
from tests.support.bfloat16_operations import ExactOperations

SMALL_SHAPES = ((64, 96), (77, 45), (MANY_INPUTS, 8))


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bfloat16_check, "SHAPES", SMALL_SHAPES)


class Float32Sums(ExactOperations):
    """Sums in float32, one input after another, in an order that may depend on the number of rows; rounded once."""

    def is_backwards(self, num_rows: int) -> bool:
        return False

    def product(self, x: Tensor, packed: Tensor) -> Tensor:
        numbers, weight = x.float(), packed.float()
        inputs = [*range(x.shape[1])]
        total = numbers.new_zeros(len(x), len(weight))
        for place in reversed(inputs) if self.is_backwards(len(x)) else inputs:
            total += numbers[:, place, None] * weight[:, place]
        return total.bfloat16()


class BackwardsBelow(Float32Sums):
    """Another order for fewer rows than `least`."""

    def __init__(self, least: int) -> None:
        self.least = least

    def is_backwards(self, num_rows: int) -> bool:
        return num_rows < self.least


class BackwardsOnOneThread(Float32Sums):
    def is_backwards(self, num_rows: int) -> bool:
        return torch.get_num_threads() == 1


class OneInputLeftOut(ExactOperations):
    def product(self, x: Tensor, packed: Tensor) -> Tensor:
        return super().product(x[:, :-1], packed[:, :-1])


class Truncated(ExactOperations):
    """The lower half of a float32 cut off, not rounded."""

    def product(self, x: Tensor, packed: Tensor) -> Tensor:
        numbers = torch.mm(x.double(), packed.t()).float()
        return (numbers.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


class SummedInBfloat16(ExactOperations):
    def product(self, x: Tensor, packed: Tensor) -> Tensor:
        half = x.shape[1] // 2
        return super().product(x[:, :half], packed[:, :half]) + super().product(x[:, half:], packed[:, half:])


class NotRounded(ExactOperations):
    def product(self, x: Tensor, packed: Tensor) -> Tensor:
        return torch.mm(x.double(), packed.t()).float()


class RowsMixedUp(ExactOperations):
    def product(self, x: Tensor, packed: Tensor) -> Tensor:
        return super().product(x, packed).roll(len(x) // 50, 0)


class NothingButNaN(ExactOperations):
    def product(self, x: Tensor, packed: Tensor) -> Tensor:
        return super().product(x, packed) * torch.nan


class InfinityCutOff(ExactOperations):
    def product(self, x: Tensor, packed: Tensor) -> Tensor:
        return super().product(x, packed).clamp(-3e38, 3e38)


class NaNLost(ExactOperations):
    def product(self, x: Tensor, packed: Tensor) -> Tensor:
        return super().product(x.masked_fill(x.isnan(), 0.0), packed)


class Spreading(ExactOperations):
    """A row with NaN or an infinity spoils the others, as a padded weight that is multiplied by it may."""

    def product(self, x: Tensor, packed: Tensor) -> Tensor:
        result = super().product(x, packed)
        if not bool(x[:-1].isfinite().all()):
            result[-1] = torch.nan
        return result


class PackedWrongly(ExactOperations):
    def unpack(self, packed: Tensor) -> Tensor:
        return packed.bfloat16().flip(0)


class Raising(ExactOperations):
    def product(self, x: Tensor, packed: Tensor) -> Tensor:
        raise RuntimeError("could not create a primitive descriptor\nfor the inner product")


def test_a_right_product_passes_with_all_shapes() -> None:
    operations = ExactOperations()
    product, problem = checked(operations)
    assert problem is None
    assert product is not None
    assert (product.least_rows_of(MANY_INPUTS - 1), product.least_rows_of(MANY_INPUTS)) == (1, 2)
    assert {inputs >= MANY_INPUTS for inputs, _ in SHAPES} == {False, True}


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize(("differs_below", "least_rows"), [(1, 1), (2, 2), (4, 4), (16, 16)])
def test_as_many_rows_are_computed_as_it_takes_for_the_same_bits(differs_below: int, least_rows: int) -> None:
    product, problem = checked(BackwardsBelow(differs_below))
    assert problem is None
    assert product is not None
    assert product.least_rows_of(64) == least_rows
    assert product.least_rows_of(MANY_INPUTS) == max(2, least_rows)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize(
    ("operations", "reason"),
    [
        (OneInputLeftOut(), "a product of 64 inputs and 96 outputs is"),
        (Truncated(), "a product of 64 inputs and 96 outputs is"),
        (SummedInBfloat16(), "a product of 64 inputs and 96 outputs is"),
        (RowsMixedUp(), "a product of 64 inputs and 96 outputs is"),
        (NothingButNaN(), "a product of 64 inputs and 96 outputs is nan"),
        (NotRounded(), "a product is torch.float32 [100, 96], not bfloat16 [100, 96]"),
        (BackwardsBelow(17), "a row of a product of 64 inputs and 96 outputs has other bits in 100 rows than in 16"),
        (InfinityCutOff(), "an infinity is lost"),
        (NaNLost(), "a NaN is lost"),
        (Spreading(), "an infinity or a NaN of a row changes another row"),
        (PackedWrongly(), "a packed weight of 64 inputs and 96 outputs is not what was packed"),
        (Raising(), "RuntimeError: could not create a primitive descriptor"),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, ExactOperations) else "",
)
def test_a_wrong_product_is_not_used_and_the_reason_is_one_line(operations: ExactOperations, reason: str) -> None:
    product, problem = checked(operations)
    assert product is None
    assert problem is not None
    assert problem.startswith(f"oneDNN's bfloat16 product failed its check: {reason}")
    assert "\n" not in problem


@pytest.mark.usefixtures("_small")
def test_bits_that_depend_on_the_number_of_threads_are_caught() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        product, problem = checked(BackwardsOnOneThread())
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert product is None
    assert problem is not None
    assert problem.endswith("has other bits with one thread than with all")


def test_a_machine_without_the_instructions_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert checked(OneDNN()) == (None, "the CPU lacks AVX512_BF16 and AMX")


def test_a_machine_that_says_it_has_them_and_has_not_is_served_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN itself, on whatever machine this is: its product is right, or is refused."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(OneDNN, "refusal", lambda self: None)
    product, problem = checked(OneDNN())
    if product is None:
        assert problem is not None
        assert problem.startswith("oneDNN's bfloat16 product failed its check: ")
    else:
        assert problem is None
