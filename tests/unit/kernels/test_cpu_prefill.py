"""The kernel of prompt chunks for a CPU against the same mathematics in float64, and what a query's bits depend on."""

from __future__ import annotations

import platform
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from millstream_kernels.arguments import KernelArgumentError
from millstream_kernels.cpu import code_folder, decode
from millstream_kernels.cpu.prefill import PagedPrompts
from millstream_kernels.cpu.task import KEY_TILE_TOKENS, PromptField
from millstream_runtime.engine.kv.layer_pool import Fp8Pool, Int8Pool, LayerPool

pytestmark = pytest.mark.skipif(
    code_folder.unsupported_machine(platform.system(), platform.machine(), code_folder.cpu_flags()) is not None,
    reason="the kernel is compiled for x86-64-v3 on Linux",
)
SCALE = 0.125
Chunk = tuple[int, int]  # new tokens, and tokens of the sequence with them
CHUNKS: list[Chunk] = [(2, 2), (7, 7), (33, 33), (16, 100), (5, 261), (30, 131), (1, 9)]


class Prompts:
    """Chunks whose blocks lie anywhere in a pool whose every other number is NaN."""

    def __init__(
        self,
        chunks: list[Chunk],
        heads: int,
        group: int,
        dim: int,
        block_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        latent: int | None = None,
    ) -> None:
        rng, generator = random.Random(1), torch.Generator().manual_seed(1)
        counts = [-(-length // block_size) for _, length in chunks]
        places = [*range(sum(counts) + 3)]
        rng.shuffle(places)
        self.chunks, self.block_size, self.latent = chunks, block_size, latent
        pool_heads = 2 * heads if latent is None else heads
        self.tables = [[places.pop() for _ in range(count)] for count in counts]
        self.pool = torch.full((pool_heads, (sum(counts) + 3) * block_size, dim), torch.nan, dtype=dtype)
        for index, (_, length) in enumerate(chunks):
            numbers = torch.randn(pool_heads, length, dim, generator=generator)
            self.pool[:, self.slots(index)] = numbers.to(dtype)
        num_tokens = sum(own for own, _ in chunks)
        self.query = torch.randn(num_tokens, heads, group, dim, generator=generator).to(dtype)

    def slots(self, index: int) -> list[int]:
        table, size = self.tables[index], self.block_size
        return [table[token // size] * size + token % size for token in range(self.chunks[index][1])]

    def rows(self, index: int) -> slice:
        first = sum(own for own, _ in self.chunks[:index])
        return slice(first, first + self.chunks[index][0])

    def call(self) -> PagedPrompts:
        lengths, num_tokens = [length for _, length in self.chunks], [own for own, _ in self.chunks]
        return PagedPrompts(decode.load(), self.tables, lengths, num_tokens, self.block_size)

    def attended(self, *stored: Any, num_threads: int = 1, **layer: Any) -> Tensor:
        """`stored`: a pool and its scales in place of the pool."""
        given = stored or (self.pool,)
        layer = {"scale": SCALE, "latent_size": self.latent, "num_threads": num_threads, **layer}
        return self.call().attend(self.query, *given, **layer)

    def part(self, index: int, first: int, end: int, **layer: Any) -> Tensor:
        """The queries `first` to `end` of a chunk, alone."""
        own, length = self.chunks[index]
        prompts = PagedPrompts(
            decode.load(), [self.tables[index]], [length - own + end], [end - first], self.block_size
        )
        query = self.query[self.rows(index)][first:end]
        return prompts.attend(query, self.pool, scale=SCALE, latent_size=self.latent, **layer)

    def expected(self, window: int | None = None, softcap: float | None = None) -> Tensor:
        """In float64, one query after another."""
        heads, results = self.query.shape[1], []
        for index, (own, length) in enumerate(self.chunks):
            for place, query in enumerate(self.query[self.rows(index)]):
                seen = length - own + place + 1
                slots = self.slots(index)[max(0, seen - window) if window else 0 : seen]
                keys = self.pool[:heads, slots].double()
                values = self.pool[heads:, slots].double() if self.latent is None else keys[..., : self.latent]
                scores = query.double() @ keys.mT * SCALE
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                results.append(scores.softmax(-1) @ values)
        return torch.stack(results)


SHAPES = {
    "demo": (4, 2, 64, 16),
    "three heads of a group": (3, 3, 64, 16),
    "one head for all": (1, 40, 40, 4),
    "no groups": (2, 1, 128, 32),
    "odd head size, blocks of one token": (2, 5, 7, 1),
    "blocks that no tile is a multiple of": (2, 2, 18, 7),
}
LATENTS = {"of two parts": (1, 20, 40, 16, 32), "the whole key": (1, 5, 7, 4, 7), "one number": (1, 3, 8, 6, 1)}
HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.matrix("shape")
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 50])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_queries_are_as_in_float64_wherever_their_blocks_lie(
    shape: tuple[int, int, int, int], window: int | None, softcap: float | None
) -> None:
    prompts = Prompts(CHUNKS, *shape)
    expected = prompts.expected(window, softcap)
    for num_threads in (1, 2, 3):
        attended = prompts.attended(window=window, softcap=softcap, num_threads=num_threads)
        assert (attended - expected).abs().max() < 2e-6


@pytest.mark.matrix("shape")
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", HALVES)
def test_16_bits_are_rounded_once_behind_sums_in_float32(
    dtype: torch.dtype, shape: tuple[int, int, int, int], window: int | None
) -> None:
    prompts = Prompts(CHUNKS, *shape, dtype=dtype)
    attended, expected = prompts.attended(window=window, num_threads=2), prompts.expected(window)
    assert attended.dtype is dtype
    assert ((attended - expected).abs() <= 2e-6 + torch.finfo(dtype).eps / 2 * expected.abs()).all()


@pytest.mark.matrix("shape")
@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("shape", LATENTS.values(), ids=LATENTS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_the_first_numbers_of_a_latent_key_are_the_value(
    dtype: torch.dtype, shape: tuple[int, int, int, int, int], window: int | None
) -> None:
    *sizes, latent = shape
    prompts = Prompts(CHUNKS, *sizes, dtype=dtype, latent=latent)
    attended, expected = prompts.attended(window=window, num_threads=2), prompts.expected(window)
    assert attended.shape == (len(prompts.query), *sizes[:2], latent)
    assert ((attended - expected).abs() <= 2e-6 + torch.finfo(dtype).eps / 2 * expected.abs()).all()


@pytest.mark.matrix("stored", "scaled")
@pytest.mark.parametrize("shape", list(SHAPES.values())[:3], ids=list(SHAPES)[:3])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("stored", ["int8", "fp8"])
def test_8_bits_are_read_as_the_numbers_that_the_pool_reads(
    stored: str, scaled: bool, window: int | None, shape: tuple[int, int, int, int]
) -> None:
    """Bit by bit the result over the dequantized pool."""
    prompts = Prompts(CHUNKS, *shape)
    numbers = prompts.pool.nan_to_num(nan=0.0) * (100.0 if scaled else 1.0)
    heads, slots, dim = numbers.shape
    if stored == "int8":
        codes = torch.zeros(heads, slots, dim, dtype=torch.int8)
        pool: LayerPool = Int8Pool(codes, torch.zeros(heads, slots, dtype=torch.float16), torch.float32)
    else:
        scales = torch.linspace(0.1, 2.0, heads).view(heads, 1, 1) if scaled else None
        pool = Fp8Pool(torch.zeros(heads, slots, dim, dtype=torch.uint8), torch.float32, scales)
    pool.write(torch.arange(slots), numbers.transpose(0, 1))
    expected = prompts.attended(pool.between(0, slots).contiguous(), window=window)
    assert torch.equal(prompts.attended(*pool.tensors, window=window, num_threads=2), expected)


@pytest.mark.matrix("latent")
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("latent", [None, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_has_the_same_bits_in_any_company_however_its_prompt_is_cut(
    dtype: torch.dtype, latent: int | None, window: int | None
) -> None:
    shape = (1 if latent else 4, 3, 64, 16)
    prompts = Prompts([(300, 300), (7, 200), (64, 64)], *shape, dtype=dtype, latent=latent)
    together = prompts.attended(window=window)
    for num_threads in (2, 3, 64):
        assert torch.equal(prompts.attended(window=window, num_threads=num_threads), together)
    for index, cuts in enumerate(((0, 1, 6, 63, 65, 200, 201, 300), (0, 4, 7), (0, 16, 64))):
        for first, end in pairwise(cuts):
            own = prompts.part(index, first, end, window=window, num_threads=2)
            assert torch.equal(own, together[prompts.rows(index)][first:end])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("part", ["key", "value"])
@pytest.mark.parametrize("window", [None, 20])
def test_a_number_that_is_not_finite_changes_only_queries_that_see_it(
    bad: float, part: str, window: int | None
) -> None:
    """Not those before it, which are in the same panel, nor those whose window has passed it, nor other chunks."""
    prompts, place = Prompts([(40, 40), (50, 140), (30, 30)], 2, 3, 18, 16), 107
    before = prompts.attended(window=window)
    prompts.pool[0 if part == "key" else 2, prompts.slots(1)[place], 3] = bad
    after = prompts.attended(window=window)
    first = prompts.rows(1).start + place - 90
    seen = slice(first, prompts.rows(1).stop if window is None else first + window)
    unseen = [row for row in range(len(before)) if not seen.start <= row < seen.stop]
    assert torch.equal(before[unseen], after[unseen])
    assert torch.equal(before[:, 1], after[:, 1])
    expected = prompts.expected(window)[seen].float()
    assert torch.equal(after[seen].isfinite(), expected.isfinite())
    if part == "value" or bad != bad:
        assert not after[seen, 0].isfinite().all(dim=-1).any()


def test_a_chunk_whose_first_tile_has_no_number_for_it_is_finite() -> None:
    """Keys of the largest negative scores, and then ordinary ones: nothing is divided by 0 in between."""
    prompts = Prompts([(4, KEY_TILE_TOKENS + 10)], 1, 2, 16, 16)
    prompts.query.abs_()
    prompts.pool[0, prompts.slots(0)[:KEY_TILE_TOKENS]] = -torch.inf
    attended = prompts.attended()
    assert (attended - prompts.expected()).abs().max() < 2e-6


def test_scores_of_any_size_give_weights_that_sum_to_one() -> None:
    prompts = Prompts([(200, 200)], 1, 2, 32, 16)
    prompts.query *= 1e4
    prompts.pool[1] = 1.0
    attended = prompts.attended(scale=1.0)
    assert torch.allclose(attended, torch.ones_like(attended), atol=1e-6)


def test_no_memory_outside_the_pool_is_read() -> None:
    prompts = Prompts([(3, 3), (20, 40)], 2, 2, 16, 16)
    last = max(max(table) for table in prompts.tables)
    for pool, problem in (
        (prompts.pool[:, : last * 16].contiguous(), "tables name a slot beyond the pool's"),
        (prompts.pool[:, ::2], "pool is not contiguous"),
        (prompts.pool.double(), "pool is float64"),
        (prompts.pool[:, :, :8].contiguous(), "pool has the shape"),
    ):
        with pytest.raises(KernelArgumentError, match=problem):
            prompts.attended(pool)


@pytest.mark.parametrize(
    ("tables", "lengths", "num_tokens", "problem"),
    [
        ([[0]], [17], [2], "tables have 1 blocks, and the tokens of their rows fill 2"),
        ([[-1]], [3], [2], "tables name the block -1"),
        ([[0]], [0], [0], r"lengths are \[0\]"),
        ([], [], [], r"lengths are \[\]"),
        ([[0]], [3], [4], "num_tokens has 4, of a sequence of 3 tokens"),
        ([[0]], [3], [0], "num_tokens has 0, of a sequence of 3 tokens"),
    ],
)
def test_chunks_that_do_not_fit_are_an_error(
    tables: list[list[int]], lengths: list[int], num_tokens: list[int], problem: str
) -> None:
    with pytest.raises(KernelArgumentError, match=problem):
        PagedPrompts(decode.load(), tables, lengths, num_tokens, 16)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda prompts: prompts.query.double(), "query is float64"),
        (lambda prompts: prompts.query[:1], r"query has the shape \[1, 2, 2, 16\]; \[7, any, any, any\] is expected"),
        (lambda prompts: prompts.query[:, :1], "pool has the shape"),
    ],
)
def test_a_wrong_query_is_an_error_that_names_it(change: Callable[[Prompts], Tensor], problem: str) -> None:
    prompts = Prompts([(3, 3), (4, 20)], 2, 2, 16, 16)
    with pytest.raises(KernelArgumentError, match=problem):
        prompts.call().attend(change(prompts), prompts.pool, scale=SCALE)


@pytest.mark.parametrize("latent", [0, 17])
def test_a_value_that_is_no_part_of_its_key_is_an_error(latent: int) -> None:
    prompts = Prompts([(3, 3)], 1, 2, 16, 16, latent=latent)
    with pytest.raises(KernelArgumentError, match=f"latent_size is {latent}; a key has 16 numbers"):
        prompts.attended()


def test_scales_that_do_not_fit_are_an_error() -> None:
    prompts = Prompts([(3, 3)], 2, 2, 16, 16)
    with pytest.raises(KernelArgumentError, match="scales are missing, and the pool is int8"):
        prompts.attended(torch.zeros(4, 64, 16, dtype=torch.int8), None)


def test_the_fields_of_a_task_follow_one_another() -> None:
    assert [field.value for field in PromptField] == [*range(len(PromptField))]
