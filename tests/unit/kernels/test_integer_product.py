"""Products by codes of 4 to 8 bits, by the kernel compiled for a CPU, against float64 over weights of llama.cpp's."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from millstream_kernels.arguments import KernelArgumentError
from millstream_kernels.cpu import code_folder, decode
from millstream_kernels.cpu.integer import check as integer_check
from millstream_kernels.cpu.integer.check import Product, rounded_rows
from millstream_kernels.cpu.integer.layouts import FORMATS
from millstream_kernels.cpu.integer.weight import IntegerWeight, empty_weight, integer_product
from millstream_kernels.cpu.task import INTEGER_INSTRUCTIONS
from millstream_runtime.gguf.block_types import BLOCK_TYPES
from millstream_runtime.quantization.block_weight import BlockWeight
from millstream_runtime.quantization.cpu.gguf_codes import integer_weight
from tests.support.gguf_files import random_rows

pytestmark = pytest.mark.skipif(
    code_folder.unsupported_machine(platform.system(), platform.machine(), code_folder.cpu_flags()) is not None,
    reason="the kernels are compiled for x86-64-v3 on Linux",
)
FLAGS = {*code_folder.cpu_flags()}
SETS = [name for name, needed in INTEGER_INSTRUCTIONS.items() if needed <= FLAGS]
INPUTS = {name: (256, 768) if BLOCK_TYPES[name].block_elements == 256 else (32, 576) for name in FORMATS}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def blocks_of(name: str, outputs: int, inputs: int) -> tuple[BlockWeight, Tensor]:
    """A weight of random blocks, and its numbers as the `gguf` package reads them, float64."""
    rows = random_rows(name, outputs, inputs, inputs)
    dense = gguf.dequantize(rows, GGMLQuantizationType[name])
    weight = BlockWeight(torch.from_numpy(rows).view(outputs, -1), BLOCK_TYPES[name], inputs)
    return weight, torch.from_numpy(dense.copy()).view(outputs, inputs).double()


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("outputs", [1, 48, 100])
def test_a_product_is_that_of_the_file_s_weights_by_rounded_rows(outputs: int, name: str, instructions: str) -> None:
    for inputs in INPUTS[name]:
        blocks, dense = blocks_of(name, outputs, inputs)
        x = drawn(37, inputs)
        product = integer_product(decode.load(), instructions, x, integer_weight(blocks))
        rows = rounded_rows(x)
        error = (product.double() - rows @ dense.t()).abs()
        assert bool((error <= 2.0**-20 * (rows.abs() @ dense.abs().t())).all())
        assert float((rows - x).norm() / x.norm()) < 0.008  # what rounding a row to 8 bits costs


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_has_the_same_bits_in_any_company_by_all_instructions(name: str) -> None:
    """From 1 to 512 rows: both ways of preparing rows, tiles of all heights."""
    inputs = INPUTS[name][1]
    blocks, _ = blocks_of(name, 160, inputs)
    weight, x = integer_weight(blocks), drawn(512, inputs)
    expected = integer_product(decode.load(), SETS[0], x, weight)
    for instructions in SETS:
        for num_threads in (1, 2):
            with threads(num_threads):
                product = partial(integer_product, decode.load(), instructions)
                assert torch.equal(product(x, weight), expected)
                for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 31, 64, 200):
                    assert torch.equal(product(x[:count], weight), expected[:count]), f"{count} rows"
                    assert torch.equal(product(x[-count:], weight), expected[-count:]), f"last {count}"


@pytest.mark.parametrize("name", FORMATS)
def test_the_largest_numbers_do_not_overflow(name: str) -> None:
    """All bits of all codes set, all rows at their largest: sums of AVX2 in 16 bits are the narrowest."""
    inputs = INPUTS[name][1]
    kind = BLOCK_TYPES[name]
    rows = np.full((16, inputs // kind.block_elements, kind.block_bytes), 0xFF, dtype=np.uint8)
    for at in kind.halves:
        rows[..., at : at + 2] = np.frombuffer(np.float16(0.01).tobytes(), dtype=np.uint8)
    if name == "Q8_0":
        rows[..., 2:] = 0x80  # -128
    stored = rows.reshape(16, -1)
    dense = torch.from_numpy(gguf.dequantize(stored, GGMLQuantizationType[name]).copy()).double()
    weight = integer_weight(BlockWeight(torch.from_numpy(stored), kind, inputs))
    x = torch.ones(9, inputs)
    x[1] = -1.0
    x[2, ::2] = -1.0
    exact = x.double() @ dense.t()
    for instructions in SETS:
        product = integer_product(decode.load(), instructions, x, weight)
        sizes = x.double().abs() @ dense.abs().t()
        assert bool(((product.double() - exact).abs() <= 2.0**-20 * sizes).all()), instructions


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_that_is_not_finite_is_nan_and_changes_no_other(name: str) -> None:
    inputs = INPUTS[name][1]
    blocks, _ = blocks_of(name, 33, inputs)
    weight, x = integer_weight(blocks), drawn(5, inputs)
    expected = integer_product(decode.load(), SETS[0], x, weight)
    spoiled = x.clone()
    spoiled[1, inputs - 1], spoiled[3, 0] = torch.nan, -torch.inf
    product = integer_product(decode.load(), SETS[0], spoiled, weight)
    assert bool(product[[1, 3]].isnan().all())
    assert torch.equal(product[[0, 2, 4]], expected[[0, 2, 4]])


def test_rows_of_zeros_and_of_tiny_numbers_are_zeros() -> None:
    blocks, _ = blocks_of("Q4_K", 16, 256)
    x = torch.zeros(2, 256)
    x[1] = 1e-40
    assert torch.equal(integer_product(decode.load(), SETS[0], x, integer_weight(blocks)), torch.zeros(2, 16))


@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_takes_the_bytes_of_its_codes(name: str) -> None:
    """At most 1.03 times those of the file."""
    blocks, _ = blocks_of(name, 160, INPUTS[name][1])
    weight = integer_weight(blocks)
    assert blocks.num_bytes <= weight.num_bytes <= 1.03 * blocks.num_bytes


@pytest.mark.parametrize("name", FORMATS)
def test_outputs_can_be_taken_in_another_order(name: str) -> None:
    inputs = INPUTS[name][1]
    blocks, _ = blocks_of(name, 70, inputs)
    weight, x, order = integer_weight(blocks), drawn(3, inputs), [5, 0, 69, 17, 16, 33] * 4
    product = integer_product(decode.load(), SETS[0], x, weight)
    reordered = weight.with_outputs(order)
    assert torch.equal(integer_product(decode.load(), SETS[0], x, reordered), product[:, order])


def test_wrong_arguments_are_refused_by_name() -> None:
    code_format = FORMATS["Q4_K"]
    with pytest.raises(KernelArgumentError, match="num_inputs is 288, no multiple of 256"):
        empty_weight(code_format, 16, 288)
    blocks, _ = blocks_of("Q4_K", 16, 256)
    weight = integer_weight(blocks)
    with pytest.raises(KernelArgumentError, match="x has rows of 255 numbers, and the weight has 256 inputs"):
        integer_product(decode.load(), SETS[0], drawn(1, 255), weight)
    with pytest.raises(KernelArgumentError, match="x is not float32"):
        integer_product(decode.load(), SETS[0], drawn(1, 256).double(), weight)


def test_a_number_halfway_between_two_codes_is_rounded_as_the_check_rounds_it() -> None:
    """Two in two million of these are halfway only by the quotient, and not by the reciprocal."""
    x, name = drawn(4096, 512, seed=3), "Q8_0"
    blocks, dense = blocks_of(name, 16, 512)
    exact, sizes = rounded_rows(x) @ dense.t(), x.double().abs() @ dense.abs().t()
    for instructions in SETS:
        product = integer_product(decode.load(), instructions, x, integer_weight(blocks))
        assert bool(((product.double() - exact).abs() <= 2.0**-20 * sizes).all()), instructions


def test_this_machine_s_product_passes_its_check() -> None:
    product, problem = integer_check.load()
    assert problem is None
    assert product is not None
    assert product.instructions == SETS[0]


def _worse(x: Tensor, weight: IntegerWeight) -> Tensor:
    return integer_product(decode.load(), SETS[0], x, weight) * 1.001


def _by_company(x: Tensor, weight: IntegerWeight) -> Tensor:
    result = integer_product(decode.load(), SETS[0], x, weight)
    return result if len(x) > 1 else result.nextafter(torch.full_like(result, torch.inf))


def _without_nan(x: Tensor, weight: IntegerWeight) -> Tensor:
    return integer_product(decode.load(), SETS[0], x, weight).nan_to_num()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (_worse, "gives .* in place of"),
        (_by_company, "has other bits in 1 rows than in 19"),
        (_without_nan, "an infinity or a NaN is lost"),
    ],
)
def test_a_product_that_is_wrong_is_not_used(wrong: Product, words: str) -> None:
    """The next instructions are tried."""
    none, problem = integer_check.checked([("new", wrong)])
    assert none is None
    assert problem is not None
    assert problem.startswith("the integer product by new failed its check: ")
    assert re.search(words, problem)
    right = partial(integer_product, decode.load(), SETS[-1])
    found, _ = integer_check.checked([("new", wrong), ("old", right)])
    assert found is not None
    assert found.instructions == "old"
