"""The decode kernel for a CPU against the same mathematics in float64, and what it is loaded from."""

from __future__ import annotations

import json
import os
import platform
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hack.kernels import prebuild_cpu
from millstream_kernels.arguments import KernelArgumentError
from millstream_kernels.cpu import code_folder, decode
from millstream_kernels.cpu.code_folder import CodeError
from millstream_kernels.cpu.decode import PagedDecodes
from millstream_kernels.cpu.task import Field
from millstream_runtime.engine.kv.layer_pool import Fp8Pool, Int8Pool, LayerPool

pytestmark = pytest.mark.skipif(
    code_folder.unsupported_machine(platform.system(), platform.machine(), code_folder.cpu_flags()) is not None,
    reason="the kernel is compiled for x86-64-v3 on Linux",
)
SCALE = 0.125


class Rows:
    """Rows whose blocks lie anywhere in a pool whose every other number is NaN. `latent`: see `PagedDecodes.attend`."""

    def __init__(
        self,
        lengths: list[int],
        heads: int,
        group: int,
        dim: int,
        block_size: int,
        seed: int = 0,
        *,
        dtype: torch.dtype = torch.float32,
        latent: int | None = None,
    ) -> None:
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        counts = [-(-length // block_size) for length in lengths]
        places = [*range(sum(counts) + 3)]
        rng.shuffle(places)
        self.lengths, self.block_size, self.latent = lengths, block_size, latent
        pool_heads = 2 * heads if latent is None else heads
        self.tables = [[places.pop() for _ in range(count)] for count in counts]
        self.pool = torch.full((pool_heads, (sum(counts) + 3) * block_size, dim), torch.nan, dtype=dtype)
        for row in range(len(lengths)):
            numbers = torch.randn(pool_heads, lengths[row], dim, generator=generator)
            self.pool[:, self.slots(row)] = numbers.to(dtype)
        self.query = torch.randn(len(lengths), heads, group, dim, generator=generator).to(dtype)

    def slots(self, row: int) -> list[int]:
        table, size = self.tables[row], self.block_size
        return [table[token // size] * size + token % size for token in range(self.lengths[row])]

    def alone(self, row: int) -> PagedDecodes:
        return PagedDecodes(decode.load(), [self.tables[row]], [self.lengths[row]], self.block_size)

    def together(self) -> PagedDecodes:
        return PagedDecodes(decode.load(), self.tables, self.lengths, self.block_size)

    def attended(self, row: int | None = None, *, num_threads: int = 1, **layer: Any) -> Tensor:
        """Of all rows, or of one that is alone."""
        decodes = self.together() if row is None else self.alone(row)
        query = self.query if row is None else self.query[row : row + 1]
        return decodes.attend(query, self.pool, scale=SCALE, latent_size=self.latent, num_threads=num_threads, **layer)

    def expected(self, window: int | None, softcap: float | None) -> Tensor:
        """In float64, one row after another."""
        heads = self.query.shape[1]
        rows = []
        for row in range(len(self.lengths)):
            slots = self.slots(row)[-window:] if window else self.slots(row)
            keys = self.pool[:heads, slots].double()
            values = self.pool[heads:, slots].double() if self.latent is None else keys[..., : self.latent]
            scores = self.query[row].double() @ keys.mT * SCALE
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            rows.append(scores.softmax(-1) @ values)
        return torch.stack(rows)


SHAPES = {
    "demo": (4, 2, 64, 16),
    "three heads of a group": (3, 3, 64, 16),
    "one head for all": (1, 8, 40, 4),
    "no groups": (2, 1, 128, 32),
    "odd head size, blocks of one token": (2, 5, 7, 1),
    "blocks that are no multiple of four": (2, 2, 16, 6),
}
LATENTS = {"of two parts": (1, 16, 40, 16, 32), "the whole key": (1, 5, 7, 4, 7), "one number": (1, 3, 8, 6, 1)}
HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.deep
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_rows_are_as_in_float64_wherever_their_blocks_lie(
    shape: tuple[int, int, int, int], window: int | None, softcap: float | None
) -> None:
    rows = Rows([1, 2, 3, 4, 5, 16, 17, 31, 100, 333], *shape)
    expected = rows.expected(window, softcap)
    for num_threads in (1, 2, 3, 64):
        attended = rows.together().attend(
            rows.query, rows.pool, scale=SCALE, window=window, softcap=softcap, num_threads=num_threads
        )
        assert (attended - expected).abs().max() < 2e-6


@pytest.mark.deep
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", HALVES)
def test_16_bits_are_rounded_once_behind_sums_in_float32(
    dtype: torch.dtype, shape: tuple[int, int, int, int], window: int | None
) -> None:
    rows = Rows([1, 2, 17, 100, 333], *shape, dtype=dtype)
    attended = rows.attended(window=window, num_threads=2)
    assert attended.dtype is dtype
    expected = rows.expected(window, None)
    assert ((attended - expected).abs() <= 2e-6 + torch.finfo(dtype).eps / 2 * expected.abs()).all()


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("shape", LATENTS.values(), ids=LATENTS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_the_first_numbers_of_a_latent_key_are_the_value(
    dtype: torch.dtype, shape: tuple[int, int, int, int, int], window: int | None
) -> None:
    *sizes, latent = shape
    rows = Rows([1, 2, 17, 100, 333], *sizes, dtype=dtype, latent=latent)
    expected = rows.expected(window, None)
    for num_threads in (1, 2, 64):
        attended = rows.attended(window=window, num_threads=num_threads)
        assert attended.shape == (5, *sizes[:2], latent)
        assert ((attended - expected).abs() <= 2e-6 + torch.finfo(dtype).eps / 2 * expected.abs()).all()


@pytest.mark.parametrize("latent", [None, 40])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_a_row_has_one_result_in_any_company_and_with_any_number_of_threads(
    dtype: torch.dtype, latent: int | None
) -> None:
    rows = Rows([5, 700, 64, 1, 333], 1 if latent else 4, 8, 64, 16, dtype=dtype, latent=latent)
    together = rows.attended(num_threads=2)
    for row in range(5):
        for num_threads in (1, 4, 64):  # more than there are heads of keys
            assert torch.equal(rows.attended(row, num_threads=num_threads)[0], together[row])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("head", ["key", "value"])
def test_a_number_that_is_not_finite_is_seen_in_its_own_row_and_in_no_other(bad: float, head: str) -> None:
    rows = Rows([40, 50, 60], 2, 2, 16, 16)
    before = rows.together().attend(rows.query, rows.pool, scale=SCALE)
    rows.pool[0 if head == "key" else 2, rows.slots(1)[7], 3] = bad
    after = rows.together().attend(rows.query, rows.pool, scale=SCALE)
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    if bad != bad or head == "value":
        assert not after[1, 0].isfinite().all()
    expected = rows.expected(None, None)[1].float()
    assert torch.equal(after[1].isfinite(), expected.isfinite())


@pytest.mark.parametrize("place", [3, 30], ids=["value", "rotated part of the key"])
def test_a_latent_number_that_is_not_finite_is_seen_in_its_own_row_and_in_no_other(place: int) -> None:
    rows = Rows([40, 50, 60], 1, 4, 32, 16, latent=24)
    before = rows.attended()
    rows.pool[0, rows.slots(1)[7], place] = torch.nan
    after = rows.attended()
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert after[1].isnan().all()


def test_scores_of_any_size_give_weights_that_sum_to_one() -> None:
    rows = Rows([200], 1, 2, 32, 16)
    rows.query *= 1e4
    rows.pool[1] = 1.0
    attended = rows.together().attend(rows.query, rows.pool, scale=1.0)
    assert torch.allclose(attended, torch.ones_like(attended), atol=1e-6)


@pytest.mark.deep
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("stored", ["int8", "fp8"])
def test_8_bits_are_read_as_the_numbers_that_the_pool_reads(
    stored: str, scaled: bool, shape: tuple[int, int, int, int], window: int | None
) -> None:
    """Bit by bit the result over the dequantized pool, NaN, zeros, subnormal and very large numbers included."""
    rows = Rows([1, 2, 17, 100, 333], *shape)
    numbers = rows.pool.nan_to_num(nan=0.0) * (100.0 if scaled else 1.0)
    numbers[:, rows.slots(1)] *= 1e-5
    numbers[0, rows.slots(2)[-1], 0] = torch.nan
    numbers[-1, rows.slots(3)[-1], 1] = 1e6
    heads, slots, dim = numbers.shape
    if stored == "int8":
        codes = torch.zeros(heads, slots, dim, dtype=torch.int8)
        pool: LayerPool = Int8Pool(codes, torch.zeros(heads, slots, dtype=torch.float16), torch.float32)
    else:
        scales = torch.linspace(0.1, 2.0, heads).view(heads, 1, 1) if scaled else None
        pool = Fp8Pool(torch.zeros(heads, slots, dim, dtype=torch.uint8), torch.float32, scales)
    pool.write(torch.arange(slots), numbers.transpose(0, 1))
    expected = rows.together().attend(rows.query, pool.between(0, slots).contiguous(), scale=SCALE, window=window)
    attended = rows.together().attend(rows.query, *pool.tensors, scale=SCALE, window=window, num_threads=2)
    assert torch.equal(attended.nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9))
    assert attended[:2].isfinite().all()
    assert attended[2, 0].isnan().all()


def test_every_code_of_8_bits_is_read_right() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256, 1)
    decodes = PagedDecodes(decode.load(), [[code] for code in range(256)], [1] * 256, 1)
    query = torch.ones(256, 1, 1, 1)
    zeros = torch.zeros_like(codes)  # keys, so that a NaN in the value alone is seen
    of_fp8 = decodes.attend(query, torch.cat((zeros, codes)), torch.ones(2), scale=1.0).flatten()
    numbers = codes.view(torch.float8_e4m3fn).float().flatten()
    assert torch.equal(of_fp8.nan_to_num(nan=1e9), numbers.nan_to_num(nan=1e9))
    signed = codes.view(torch.int8)
    scales = torch.full((2, 256), 0.37, dtype=torch.float16)
    of_int8 = decodes.attend(query, torch.cat((signed, signed)), scales, scale=1.0).flatten()
    assert torch.equal(of_int8, signed.flatten().float() * scales[0].float())


@pytest.mark.parametrize("dtype", HALVES)
def test_every_number_of_16_bits_is_read_right(dtype: torch.dtype) -> None:
    """Infinities, NaN and subnormal numbers included."""
    numbers = torch.arange(1 << 16).to(torch.uint16).view(dtype)
    decodes = PagedDecodes(decode.load(), [[number] for number in range(1 << 16)], [1] * (1 << 16), 1)
    pool = torch.stack((torch.zeros_like(numbers), numbers)).unsqueeze(-1)
    read = decodes.attend(torch.ones(1 << 16, 1, 1, 1), pool, scale=1.0).flatten()
    limits = {"nan": 1e39, "posinf": 2e38, "neginf": -2e38}
    assert torch.equal(read.double().nan_to_num(**limits), numbers.double().nan_to_num(**limits))


@pytest.mark.parametrize(
    ("dtype", "scales", "problem"),
    [
        (torch.int8, None, "scales are missing, and the pool is int8"),
        (torch.int8, torch.ones(4), "scales has the shape"),
        (torch.int8, torch.ones(4, 32), "scales is float32"),
        (torch.uint8, torch.ones(2), "scales has the shape"),
        (torch.float32, torch.ones(4), "scales are given, and the pool is float32"),
        (torch.bfloat16, torch.ones(4), "scales are given, and the pool is bfloat16"),
        (torch.int8, torch.ones(32, 4, dtype=torch.float16).mT, "not contiguous"),
    ],
)
def test_scales_that_do_not_fit_are_an_error(dtype: torch.dtype, scales: Tensor | None, problem: str) -> None:
    rows = Rows([3], 2, 2, 16, 16)
    pool = torch.zeros(4, 32, 16, dtype=dtype)
    decodes = PagedDecodes(decode.load(), [[0]], [3], 16)
    with pytest.raises(KernelArgumentError, match=problem):
        decodes.attend(rows.query, pool, scales, scale=SCALE)


@pytest.mark.parametrize("latent", [0, 17])
def test_a_value_that_is_no_part_of_its_key_is_an_error(latent: int) -> None:
    rows = Rows([3, 4], 1, 2, 16, 16, latent=latent)
    with pytest.raises(KernelArgumentError, match=f"latent_size is {latent}; a key has 16 numbers"):
        rows.attended()


def test_a_pool_with_values_of_their_own_has_no_latent() -> None:
    rows = Rows([3, 4], 1, 2, 16, 16)
    with pytest.raises(KernelArgumentError, match=r"pool has the shape \[2, 80, 16\]; \[1, any, 16\] is expected"):
        rows.together().attend(rows.query, rows.pool, scale=SCALE, latent_size=8)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        (lambda rows: rows.query.double(), "query"),
        (lambda rows: rows.query[:1], "query"),
        (lambda rows: rows.query[:, :1], "pool"),
        (lambda rows: rows.query[0], "query"),
    ],
)
def test_a_wrong_query_is_an_error_that_names_it(change: Callable[[Rows], Tensor], argument: str) -> None:
    rows = Rows([3, 4], 2, 2, 16, 16)
    with pytest.raises(KernelArgumentError) as raised:
        rows.together().attend(change(rows), rows.pool, scale=SCALE)
    assert raised.value.argument == argument


def test_no_memory_outside_the_pool_is_read() -> None:
    rows = Rows([3, 40], 2, 2, 16, 16)
    decodes = rows.together()
    last = max(max(table) for table in rows.tables)
    for pool, problem in (
        (rows.pool[:, : last * 16].contiguous(), "slot beyond"),
        (rows.pool[:, ::2], "not contiguous"),
        (rows.pool.double(), "float64"),
    ):
        with pytest.raises(KernelArgumentError, match=problem):
            decodes.attend(rows.query, pool, scale=SCALE)
    for tables, lengths, argument in (
        ([[0]], [17], "tables"),
        ([[-1]], [3], "tables"),
        ([[0]], [0], "lengths"),
        ([], [], "lengths"),
    ):
        with pytest.raises(KernelArgumentError) as raised:
            PagedDecodes(decode.load(), tables, lengths, 16)
        assert raised.value.argument == argument


@pytest.mark.deep
def test_another_compiler_compiles_again(tmp_path: Path) -> None:
    folder = tmp_path / "compiled"
    shutil.copytree(code_folder.FOLDER, folder)
    assert prebuild_cpu.is_fresh(folder)
    _change(folder, compiler="numba 0.1")
    assert not prebuild_cpu.is_fresh(folder)


def _damage_code(folder: Path) -> None:
    content = (folder / code_folder.OBJECT).read_bytes()
    (folder / code_folder.OBJECT).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def _change(folder: Path, **fields: object) -> None:
    index = json.loads((folder / code_folder.INDEX).read_text())
    (folder / code_folder.INDEX).write_text(json.dumps(index | fields))


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (shutil.rmtree, "no kernels are compiled for a CPU: .*No such file"),
        (_damage_code, "kernels.o is damaged: its SHA-256"),
        (
            lambda folder: os.truncate(folder / code_folder.OBJECT, 5 << 20),
            "kernels.o is damaged: it has more",
        ),
        (lambda folder: (folder / code_folder.OBJECT).unlink(), "no kernels are compiled for a CPU"),
        (lambda folder: (folder / code_folder.INDEX).write_text("{"), "index.json is damaged"),
        (lambda folder: (folder / code_folder.INDEX).write_text("[]"), "index.json is damaged"),
        (lambda folder: _change(folder, format=2), "has format 2; this runtime reads 1"),
        (lambda folder: _change(folder, other=1), "index.json is damaged"),
        (lambda folder: (folder / code_folder.INDEX).write_text("[" * 100_000), "index.json is damaged"),
        (lambda folder: _change(folder, cpu="skylake-avx512"), "was compiled for 'skylake-avx512'; this runtime reads"),
        (lambda folder: _change(folder, sources_sha256="0"), "was compiled from other sources; `make venv`"),
    ],
)
def test_code_that_is_not_what_it_should_be_is_not_run(
    damage: Callable[[Path], object], problem: str, tmp_path: Path
) -> None:
    folder = tmp_path / "compiled"
    shutil.copytree(code_folder.FOLDER, folder)
    assert code_folder.read(folder)
    damage(folder)
    with pytest.raises(CodeError, match=problem):
        code_folder.read(folder)
    assert not prebuild_cpu.is_fresh(folder)


@pytest.mark.parametrize(
    ("machine", "problem"),
    [
        (("Linux", "aarch64", []), "compiled for Linux on x86-64, and this is Linux on aarch64"),
        (("Darwin", "x86_64", []), "compiled for Linux on x86-64, and this is Darwin on x86_64"),
        (("Linux", "x86_64", ["avx", "fma"]), "the CPU lacks abm, avx2, bmi1, bmi2, f16c, movbe"),
        (("Linux", "x86_64", [*code_folder.X86_64_V3, "sse"]), None),
    ],
)
def test_a_machine_that_cannot_run_the_code_is_named(machine: tuple[str, str, list[str]], problem: str | None) -> None:
    found = code_folder.unsupported_machine(*machine)
    assert found is None if problem is None else problem in str(found)


def test_the_fields_of_a_task_follow_one_another() -> None:
    assert [field.value for field in Field] == [*range(len(Field))]
