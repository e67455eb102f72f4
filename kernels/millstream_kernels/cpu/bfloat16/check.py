"""Check oneDNN's bfloat16 product on this machine, once per process, before a layer uses it.

values      against float64 with the same bfloat16 numbers; rounding the result may cost 2 ** -8 of it
rows        a row has the same bits alone, among few and among many, with one thread and with all
sums        half of the outputs are sums that cancel: what is left of them are roundings, so another order of the
            same sum shows, which rounding to 8 bits would hide in nearly all others
infinities  stay where they are, and NaN too; the rows next to them do not change
packing     gives the weight back
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from millstream_kernels.cpu.bfloat16.product import MANY_INPUTS, Bfloat16Product, OneDNN, Operations

SHAPES = ((77, 45), (576, 1536), (MANY_INPUTS, 512))  # inputs, outputs
NUM_ROWS = 100
COMPARED_ROWS = (1, 2, 3, 4, 8, 16)
LEAST_ROWS = (1, 2, 4, 8, 16)  # that may be computed for one
ROUNDING, SUM_ERROR = 2.0**-8, 2.0**-14  # of a result; of the sum of the sizes of what it is made of


class ProductError(Exception):
    """The product is not what it should be; the message says how."""


@functools.cache
def load() -> tuple[Bfloat16Product | None, str | None]:
    """Return this machine's product, or None and why it has none: as `checked`."""
    return checked(OneDNN())


def checked(operations: Operations) -> tuple[Bfloat16Product | None, str | None]:
    """Return the product, or None and why it cannot be used, for people. Whatever it raises is a reason."""
    if (refusal := operations.refusal()) is not None:
        return None, refusal
    try:
        least_rows, least_rows_of_many = 1, 1
        for num_inputs, num_outputs in SHAPES:
            least = _check(operations, num_inputs, num_outputs)
            if num_inputs < MANY_INPUTS:
                least_rows = max(least_rows, least)
            else:
                least_rows_of_many = max(least_rows_of_many, least, 2)
    except ProductError as error:
        return None, f"oneDNN's bfloat16 product failed its check: {error}"
    except Exception as error:  # whatever its code raises, the model is served without it
        first_line = str(error).partition("\n")[0][:200]
        return None, f"oneDNN's bfloat16 product failed its check: {type(error).__name__}: {first_line}"
    return Bfloat16Product(operations, least_rows, max(least_rows, least_rows_of_many)), None


@torch.inference_mode()
def _check(operations: Operations, num_inputs: int, num_outputs: int) -> int:
    """Return how many rows must be computed at least. Raises ProductError."""
    x, weight = cancelling_numbers(num_inputs, num_outputs)
    shape = f"{num_inputs} inputs and {num_outputs} outputs"
    packed = operations.pack(weight)
    if not torch.equal(operations.unpack(packed), weight):
        raise ProductError(f"a packed weight of {shape} is not what was packed")
    result = _product(operations, x, packed, num_outputs)
    exact, sizes = x.double() @ weight.double().t(), x.float().abs() @ weight.float().abs().t()
    error = (result.double() - exact).abs() - (ROUNDING * exact.abs() + SUM_ERROR * sizes)
    if not bool((error <= 0).all()):  # NaN is not below anything
        row, output = divmod(int(error.nan_to_num(nan=torch.inf).argmax()), num_outputs)
        raise ProductError(
            f"a product of {shape} is {float(result[row, output]):.6g} in place of {float(exact[row, output]):.6g}"
        )
    _check_numbers_that_are_not_finite(operations, x, packed, result, weight)
    return _least_rows(operations, x, packed, result, shape)


def _least_rows(operations: Operations, x: Tensor, packed: Tensor, result: Tensor, shape: str) -> int:
    """Return the least number of rows from which on a row has the bits of `result`, with any number of threads."""
    same = {count: _has_same_bits(operations, x, packed, result, count) for count in COMPARED_ROWS}
    with _threads(1):
        for count in COMPARED_ROWS:
            same[count] = same[count] and _has_same_bits(operations, x, packed, result, count)
        if not torch.equal(operations.product(x, packed), result):
            raise ProductError(f"a row of a product of {shape} has other bits with one thread than with all")
    for least in LEAST_ROWS:
        if all(is_same for count, is_same in same.items() if count >= least):
            return least
    raise ProductError(f"a row of a product of {shape} has other bits in {NUM_ROWS} rows than in {LEAST_ROWS[-1]}")


def _has_same_bits(operations: Operations, x: Tensor, packed: Tensor, result: Tensor, count: int) -> bool:
    """Whether the first and the last `count` rows have the bits that they have among all."""
    return all(
        torch.equal(operations.product(x[rows], packed), result[rows])
        for rows in (slice(0, count), slice(NUM_ROWS - count, NUM_ROWS))
    )


def _check_numbers_that_are_not_finite(
    operations: Operations, x: Tensor, packed: Tensor, result: Tensor, weight: Tensor
) -> None:
    """Raises ProductError."""
    bad = x[:4].clone()
    bad[1, 0], bad[2, 0] = torch.inf, torch.nan
    found = _product(operations, bad, packed, len(weight))
    if not torch.equal(found[1], torch.inf * weight[:, 0].sign()):
        raise ProductError("an infinity is lost")
    if not bool(found[2].isnan().all()):
        raise ProductError("a NaN is lost")
    if not torch.equal(found[[0, 3]], _product(operations, x[:4], packed, len(weight))[[0, 3]]):
        raise ProductError("an infinity or a NaN of a row changes another row")


def _product(operations: Operations, x: Tensor, packed: Tensor, num_outputs: int) -> Tensor:
    result = operations.product(x, packed)
    if result.dtype is not torch.bfloat16 or result.shape != (len(x), num_outputs):
        raise ProductError(f"a product is {result.dtype} {[*result.shape]}, not bfloat16 {[len(x), num_outputs]}")
    return result


def cancelling_numbers(num_inputs: int, num_outputs: int) -> tuple[Tensor, Tensor]:
    """`x` `[NUM_ROWS, in]` and a weight `[out, in]`, bfloat16, the same in every process.

    The second half of a row is the first half with other signs, and so odd outputs, whose weights come twice, cancel.
    Odd rows have numbers of many sizes, so that nearly every addition rounds.
    """
    random = torch.Generator().manual_seed(num_inputs)
    half = num_inputs // 2
    x = torch.randn(NUM_ROWS, num_inputs, generator=random)
    x[1::2] *= torch.randint(-6, 7, (NUM_ROWS // 2, num_inputs), generator=random).float().exp2()
    x[:, half : 2 * half] = -x[:, :half]
    weight = torch.randn(num_outputs, num_inputs, generator=random)
    weight[1::2, half : 2 * half] = weight[1::2, :half]
    weight[:, 0] = weight[:, 0].sign()  # no zero, which times infinity is NaN
    return x.bfloat16(), weight.bfloat16()


@contextmanager
def _threads(num_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
