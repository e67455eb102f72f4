"""A weight in two layouts: the same numbers for any number of rows, and a copy only where there is room for it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from millstream_runtime.models.cpu import two_layouts
from millstream_runtime.models.cpu.linear import CpuLinear
from millstream_runtime.models.registry import load_model, load_model_config
from tests.support.tiny_model import write_tiny_model

CPU = torch.device("cpu")

# Prints by how many bytes a process grows that serves prompts of 500 lengths with a model of four shapes of weight.
MANY_LENGTHS = """
import millstream_runtime.engine
import torch
from millstream_runtime.engine.host_limits import resident_bytes
from millstream_runtime.models.cpu import two_layouts

weights = [torch.randn(out, 256).t() for out in (256, 512, 768, 1024)]
packed = [two_layouts.pack(weight) for weight in weights]
wide = torch.randn(600, 256)

def prompt(length):
    for weight, copy in zip(weights, packed):
        two_layouts.product(wide[:length], weight, copy, None)

prompt(600)
before = resident_bytes()
for length in range(2, 502):
    prompt(length)
print(resident_bytes() - before)
"""

pytestmark = pytest.mark.skipif(not two_layouts.can_pack(torch.float32, CPU), reason="torch without oneDNN")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def in_two_layouts(weight: torch.Tensor, bias: torch.Tensor | None) -> CpuLinear:
    return CpuLinear(weight, bias, packed=two_layouts.pack(weight))


@pytest.mark.matrix("size")
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("size", [(1, 1), (37, 51), (512, 640), (300, 1021)], ids=str)
def test_products_are_those_of_the_plain_weight(size: tuple[int, int], has_bias: bool, threads: int) -> None:
    torch.set_num_threads(threads)
    weight = torch.randn(size[1], size[0]).t()
    bias = torch.randn(size[1]) if has_bias else None
    plain, two = CpuLinear(weight, bias), in_two_layouts(weight, bias)
    for rows in (0, 1, 2, 7, 16, 17, 130):
        wide = torch.randn(rows, 2 * size[0])
        for x in (wide[:, : size[0]].contiguous(), wide[:, size[0] :]):  # a view of rows that lie apart too
            torch.testing.assert_close(two(x), plain(x), rtol=1e-4, atol=1e-4)
            one, other = torch.ones(2, rows, size[1]).unbind(0)
            plain.add_to(one, x)
            two.add_to(other, x)
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)


def test_rows_are_padded_to_few_numbers_and_by_little() -> None:
    padded = {num_rows: two_layouts.padded_rows(num_rows) for num_rows in range(2, 2049)}
    assert all(padded[num_rows] == num_rows for num_rows in range(2, 17)), "decodes of up to 16 requests are exact"
    assert all(num_rows <= wanted < 1.125 * num_rows for num_rows, wanted in padded.items())
    assert len(set(padded.values())) <= 80
    assert all(two_layouts.padded_rows(wanted) == wanted for wanted in padded.values())


@pytest.mark.deep
def test_prompts_of_many_lengths_do_not_fill_the_memory_with_code() -> None:
    done = subprocess.run([sys.executable, "-c", MANY_LENGTHS], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 200 << 20, "bytes"


def test_outputs_in_another_order_are_so_in_both_layouts() -> None:
    order = torch.randperm(51, generator=torch.Generator().manual_seed(2)).tolist()
    two = in_two_layouts(torch.randn(51, 37).t(), torch.randn(51))
    for x in (torch.randn(1, 37), torch.randn(5, 37)):
        torch.testing.assert_close(two.reordered(order)(x), two(x)[:, order])


def test_only_float32_on_a_cpu_is_packed() -> None:
    assert not two_layouts.can_pack(torch.float64, CPU)
    assert not two_layouts.can_pack(torch.bfloat16, CPU)
    assert not two_layouts.can_pack(torch.float32, torch.device("meta"))


@pytest.mark.deep
def test_a_model_computes_the_same_with_room_for_copies_and_without(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    config = load_model_config(folder)
    with_copies, without = (
        load_model(config, folder, torch.float32, CPU, copy_budget_bytes=room) for room in (1 << 30, 0)
    )
    assert with_copies.weight_bytes > without.weight_bytes
    hidden = torch.randn(3, config.hidden_size)
    torch.testing.assert_close(with_copies.logits(hidden), without.logits(hidden), rtol=1e-4, atol=1e-4)
