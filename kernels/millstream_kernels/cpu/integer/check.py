"""Check products by codes of 4 to 8 bits on this machine, once per process, before a layer uses them.

values    against float64 over the same rounded rows and the same weights
rows      a row has the same bits alone, among few and among many, with one thread and with all
NaN       a row with a NaN or an infinity is NaN, and the rows next to it do not change

The instructions of this CPU that are quickest come first; where they fail the check, the next ones are tried.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from millstream_kernels.cpu import code_folder, decode
from millstream_kernels.cpu.code_folder import CodeError
from millstream_kernels.cpu.integer.layouts import FORMATS, GROUP_INPUTS, CodeFormat
from millstream_kernels.cpu.integer.weight import IntegerWeight, OutputCodes, empty_weight, integer_product
from millstream_kernels.cpu.task import INTEGER_INSTRUCTIONS

NUM_INPUTS, NUM_OUTPUTS, NUM_ROWS = 512, 40, 19
COMPARED_ROWS = (1, 2, 3, 5, 8, 9)
ERROR = 2.0**-18  # of the sum of the sizes of what a result is made of: sums of 16 groups in float32

Product = Callable[[Tensor, IntegerWeight], Tensor]


@dataclass(frozen=True, slots=True)
class IntegerProduct:
    """A product that passed its check. `instructions`: what computes it, one of `task.INTEGER_INSTRUCTIONS`."""

    instructions: str
    product: Product


class IntegerProductError(Exception):
    """The product is not what it should be; the message says how."""


@functools.cache
def load() -> tuple[IntegerProduct | None, str | None]:
    """Return this machine's product, or None and why it has none."""
    try:
        code = decode.load()
    except CodeError as error:
        return None, str(error)
    flags = {*code_folder.cpu_flags()}
    usable = [name for name, needed in INTEGER_INSTRUCTIONS.items() if needed <= flags]
    return checked((name, functools.partial(integer_product, code, name)) for name in usable)


def checked(products: Iterable[tuple[str, Product]]) -> tuple[IntegerProduct | None, str | None]:
    """Return the first that is right, or None and why the last one cannot be used, for people."""
    problem: str | None = "the CPU has no instructions for it"
    for name, product in products:
        try:
            for code_format in FORMATS.values():
                _check(product, code_format)
        except IntegerProductError as error:
            problem = f"the integer product by {name} failed its check: {error}"
        except Exception as error:  # whatever it raises, the model is served without it
            first_line = str(error).partition("\n")[0][:200]
            problem = f"the integer product by {name} failed its check: {type(error).__name__}: {first_line}"
        else:
            return IntegerProduct(name, product), None
    return None, problem


@torch.inference_mode()
def _check(product: Product, code_format: CodeFormat) -> None:
    """Raises IntegerProductError."""
    x, weight, dense = _numbers(code_format)
    result = product(x, weight)
    rows = rounded_rows(x)
    exact, sizes = rows @ dense.t(), rows.abs() @ dense.abs().t()
    error = (result.double() - exact).abs() - ERROR * sizes
    if result.shape != exact.shape or not bool((error <= 0).all()):  # NaN is not below anything
        place = int(error.nan_to_num(nan=torch.inf).argmax())
        raise IntegerProductError(
            f"{code_format.name} gives {float(result.flatten()[place]):.6g} in place of "
            f"{float(exact.flatten()[place]):.6g}"
        )
    for count in COMPARED_ROWS:
        for some in (slice(0, count), slice(NUM_ROWS - count, NUM_ROWS)):
            if not torch.equal(product(x[some], weight), result[some]):
                raise IntegerProductError(
                    f"a row of {code_format.name} has other bits in {count} rows than in {NUM_ROWS}"
                )
    bad = x[:4].clone()
    bad[1, 7], bad[2, NUM_INPUTS - 1] = torch.inf, torch.nan
    spoiled = product(bad, weight)
    if not bool(spoiled[1:3].isnan().all()):
        raise IntegerProductError(f"an infinity or a NaN is lost in {code_format.name}")
    if not torch.equal(spoiled[[0, 3]], result[[0, 3]]):
        raise IntegerProductError(f"an infinity or a NaN of a row changes another row in {code_format.name}")


def rounded_rows(x: Tensor) -> Tensor:
    """`x` `[T, in]` as the kernel rounds it, float64."""
    groups = x.unflatten(1, (-1, GROUP_INPUTS))
    sizes = groups.abs().amax(2, keepdim=True)
    levels = torch.full_like(sizes, 127.0)  # `127 / sizes` is 127 times a rounded reciprocal: ties would differ
    codes = torch.where(sizes > 0, groups * (levels / sizes), 0.0).round()
    rounded: Tensor = (codes.double() * (sizes / 127).double()).flatten(1)
    return rounded


def _numbers(code_format: CodeFormat) -> tuple[Tensor, IntegerWeight, Tensor]:
    """`x`, a weight, and its numbers `[out, in]` in float64; the same in every process. The largest codes occur."""
    random = torch.Generator().manual_seed(code_format.number)
    kind = code_format.scales
    units = NUM_INPUTS // kind.inputs
    x = torch.randn(NUM_ROWS, NUM_INPUTS, generator=random)
    x[0] = 1.0  # with the largest codes, the largest sums
    codes = torch.randint(0, 1 << code_format.bits, (NUM_OUTPUTS, NUM_INPUTS), generator=random).to(torch.uint8)
    codes[0], codes[1] = (1 << code_format.bits) - 1, 0
    halves = (torch.rand(NUM_OUTPUTS, units, kind.num_halves, generator=random) + 0.5).half()
    num_small = kind.inputs // GROUP_INPUTS * kind.group_bytes // 16
    most = 127 if kind.is_signed else 63
    small = torch.randint(1, most, (NUM_OUTPUTS, units, num_small), generator=random).to(torch.uint8)
    if kind.is_signed:
        small[:, :, ::3] |= 128  # negative ones
    weight = empty_weight(code_format, NUM_OUTPUTS, NUM_INPUTS)
    weight.write(OutputCodes(codes, halves.view(torch.uint8).unflatten(2, (-1, 2)), small), 0)
    return x, weight, _dense(code_format, codes, halves, small)


def _dense(code_format: CodeFormat, codes: Tensor, halves: Tensor, small: Tensor) -> Tensor:
    kind = code_format.scales
    scales, least = halves[..., :1].double(), halves[..., 1:].double()
    if kind.group_bytes:
        whole = (small.view(torch.int8) if kind.is_signed else small).double()
        if kind.has_least:
            whole = whole.unflatten(2, (-1, 2))
            scales, least = scales * whole[..., 0], least * whole[..., 1]
        else:
            scales = scales * whole
    numbers = codes.double() - code_format.offset
    scales = scales.flatten(1)
    dense: Tensor = numbers.unflatten(1, (scales.shape[1], -1)) * scales.unsqueeze(2)
    if kind.has_least:
        dense = dense - least.flatten(1).unsqueeze(2)
    return dense.flatten(1)
