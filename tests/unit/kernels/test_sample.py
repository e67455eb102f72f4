"""Tokens drawn without a sort: the engine's numbers, filters at their edges, and the distribution of what is drawn."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from millstream_kernels.arguments import KernelArgumentError
from millstream_kernels.sampling.sample import BLOCK, SamplingRows, sample_tokens
from millstream_kernels.sampling.uniform import uniform as uniform_of
from millstream_runtime.engine.request import SamplingParams
from millstream_runtime.engine.sampling.draw import cut_nuclei, draw
from millstream_runtime.engine.sampling.sampler import _mix, uniform
from tests.support.kernel_launches import recording_launches

pytestmark = pytest.mark.usefixtures("interpreter")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INF = float("inf")


@dataclass(frozen=True)
class Row:
    """What one row asks for."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0


def sample(logits: Tensor, rows: Sequence[Row], *, attempt: int = 0) -> list[int]:
    """Into tokens that are no tokens beforehand."""
    arguments = SamplingRows(
        torch.tensor([one.temperature for one in rows], dtype=FP32),
        torch.tensor([one.top_k for one in rows], dtype=torch.int32),
        torch.tensor([one.top_p for one in rows], dtype=torch.float64),
        torch.tensor([one.min_p for one in rows], dtype=FP32),
        torch.tensor([one.seed for one in rows], dtype=torch.int64),
        torch.tensor([one.position for one in rows], dtype=torch.int64),
    )
    tokens = torch.full((len(rows),), -77, dtype=torch.int64)
    return sample_tokens(logits, arguments, attempt=attempt, tokens=tokens).tolist()


def logits_of(count: int, size: int, dtype: torch.dtype = FP32, *, seed: int = 1) -> Tensor:
    """`[count, size]`, with a gap between rows that is as likely as nothing else."""
    memory = torch.full((count, size + 3), 1000.0, dtype=dtype)
    memory[:, :size] = torch.randn(count, size, generator=torch.Generator().manual_seed(seed)) * 3
    return memory[:, :size]


def kept_weights(logits: Tensor, row: Row) -> Tensor:
    """`[V]` float32: what a token may be, by a sort."""
    weights = ((logits.float() - logits.float().max()) / row.temperature).exp()
    weights = weights.masked_fill(weights < torch.tensor(row.min_p), 0.0)
    if 0 < row.top_k < len(weights):
        weights = weights.masked_fill(weights < weights.sort(descending=True).values[row.top_k - 1], 0.0)
    params = SamplingParams(1, temperature=row.temperature, top_k=row.top_k, top_p=row.top_p)
    cut_nuclei(weights[None], [params])
    return weights


def expected(logits: Tensor, row: Row) -> int:
    """The engine's token on a CPU."""
    logits = logits.float()
    weights = ((logits - logits.max()) / torch.tensor(row.temperature)).exp()
    params = SamplingParams(1, temperature=row.temperature, top_k=row.top_k, top_p=row.top_p, min_p=row.min_p)
    return int(draw(weights[None], [params], lambda _, attempt: uniform(row.seed, row.position, attempt)))


SWEEP = [
    Row(),
    Row(0.7, top_k=20, top_p=0.9, seed=7, position=3),
    Row(1.5, top_k=1, seed=2**63 - 1, position=2**40),
    Row(1.2, top_p=0.5, seed=-5, position=11),
    Row(2.0, top_p=0.999, min_p=0.02, seed=12345678901234, position=9),
    Row(1.0, top_k=5000, top_p=0.0, seed=3),
    Row(0.9, top_k=300, min_p=0.3, seed=4, position=1),
]


@pytest.mark.parametrize(("size", "dtype"), [(17, FP32), (BLOCK + 5, BF16), (2 * BLOCK, FP16)])
def test_a_row_draws_the_engines_token(size: int, dtype: torch.dtype) -> None:
    logits = logits_of(len(SWEEP), size, dtype)
    wanted = [expected(one, row) for one, row in zip(logits, SWEEP, strict=True)]
    assert sample(logits, SWEEP) == wanted
    assert sample(logits[3:4].clone(), SWEEP[3:4]) == wanted[3:4]  # alone


@pytest.mark.parametrize("levels", [1, 2, 5, 300], ids=lambda levels: f"{levels} levels")
def test_a_seed_draws_the_same_token_by_the_kernel_as_on_a_cpu(levels: int) -> None:
    """Also with ties, which are many of few levels, and at the edges of top-k, top-p and min-p."""
    generator = torch.Generator().manual_seed(levels)
    chosen = random.Random(levels)
    rows = [
        Row(
            chosen.choice((0.5, 1.0)),
            chosen.choice((0, 1, 3, 10, 39, 40, 41)),
            chosen.choice((1e-9, 0.3, 0.5, 0.9, 0.999999, 1.0)),
            chosen.choice((0.0, 0.0, 0.25, 1.0)),
            seed=seed,
            position=seed * 7,
        )
        for seed in range(75)
    ]
    logits = torch.randint(0, levels, (len(rows), 40), generator=generator) * (0.5 if levels < 9 else 0.02)
    assert sample(logits, rows) == [expected(one, row) for one, row in zip(logits, rows, strict=True)]


@triton.jit
def draw_uniform(seeds, positions, attempts, numbers):
    at = tl.program_id(0)
    tl.store(numbers + at, uniform_of(tl.load(seeds + at), tl.load(positions + at), tl.load(attempts + at)))


def test_a_seed_gives_the_engines_bits() -> None:
    seeds, positions = [0, 1, -1, 2**63 - 1, -(2**63), 42], [0, 5, 2**40, 131072, 1, 7]
    attempts = [0, 1, 2, 3, 300, 0]
    numbers = torch.full((6,), torch.nan, dtype=torch.float64)
    draw_uniform[(6,)](torch.tensor(seeds), torch.tensor(positions), torch.tensor(attempts), numbers)
    assert numbers.tolist() == [uniform(*one) for one in zip(seeds, positions, attempts, strict=True)]


def test_another_attempt_is_another_draw() -> None:
    logits, rows = torch.zeros(1, 1000), [Row(seed=8, position=3)]
    assert sample(logits, rows, attempt=2) == [int(uniform(8, 3, 2) * 1000)]


def test_tokens_that_equal_the_last_one_kept_are_kept_too() -> None:
    """Ties at the boundary of top-k, top-p and both: the order of the vocabulary decides nothing."""
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, 1.0, -1.0]])
    for row in (Row(top_k=2), Row(top_p=0.5), Row(top_k=3, top_p=0.6), Row(min_p=0.3678)):
        rows = [replace(row, seed=seed) for seed in range(16)]
        assert {*sample(logits.expand(16, 6), rows)} == {1, 2, 3, 4}, row


def position_of(number: int, seed: int) -> int:
    """The position at which `uniform` of a seed is `number * 2 ** -53`: SplitMix64 backwards."""

    def unshifted(state: int, places: int) -> int:
        found = state
        for times in range(1, 64 // places + 1):
            found ^= state >> places * times
        return found

    state = unshifted(number << 11, 31) * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
    state = unshifted(state, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
    counter = (unshifted(state, 30) - 0x9E3779B97F4A7C15) % 2**64 ^ _mix(seed)
    return counter - 2**64 if counter >= 2**63 else counter


@pytest.mark.parametrize("number", [0, 2**53 - 1])
def test_a_share_of_0_and_the_largest_below_1_draw_the_first_and_the_last_that_is_kept(number: int) -> None:
    position = position_of(number, 5)
    assert uniform(5, position) == number * 2.0**-53
    logits = torch.full((1, BLOCK + 40), -INF)
    logits[0, [3, 20, BLOCK + 17, BLOCK + 30]] = torch.tensor([1.0, 0.0, 1.0, -30.0])
    rows = [Row(top_p=0.999, seed=5, position=position)]
    assert sample(logits, rows) == [3 if number == 0 else BLOCK + 17]


def test_masked_tokens_are_never_drawn_and_masked_rows_have_none() -> None:
    logits = torch.full((4, BLOCK + 9), -INF)
    logits[0, [5, BLOCK + 3]] = torch.tensor([0.5, 0.4])
    logits[1] = torch.nan
    logits[3] = torch.randn(BLOCK + 9, generator=torch.Generator().manual_seed(0))
    logits[3, BLOCK + 8] = torch.nan
    for row in (Row(0.0), Row(top_k=3, top_p=0.99, seed=1), Row(seed=2)):
        first, *others = sample(logits, [row] * 4)
        assert first in (5, BLOCK + 3)
        assert others == [-1, -1, -1]


def test_an_infinite_logit_is_an_error_of_its_row() -> None:
    logits = torch.zeros(2, 30)
    logits[0, 4] = INF
    assert sample(logits, [Row(0.0), Row(0.0)]) == [-1, 0]
    assert sample(logits, [Row(1.0), Row(0.0)])[0] == -1


def test_temperature_0_takes_the_first_of_the_highest() -> None:
    logits = logits_of(2, BLOCK + 50)
    logits[0, [40, 900, BLOCK + 2]] = 50.0
    assert sample(logits, [Row(0.0), Row(1e-38)]) == [40, int(logits[1].argmax())]


def test_filters_that_ask_for_all_change_nothing() -> None:
    """k = V, k beyond V, p = 1: the same draw as without, and no pass is made for them."""
    logits = logits_of(1, 200)
    for seed in range(3):
        rows = [Row(), Row(top_k=200), Row(top_k=2**31 - 1), Row(top_p=1.0), Row(min_p=0.0)]
        assert len({*sample(logits.expand(5, 200), [replace(row, seed=seed) for row in rows])}) == 1


def test_what_is_drawn_has_the_distribution_that_was_asked_for() -> None:
    """80 draws of one row in one launch; chi-squared at 1e-6 for 7 degrees of freedom."""
    row, count = Row(1.3), 80
    logits = logits_of(1, 8, seed=5).expand(count, 8) / 3
    drawn = sample(logits, [replace(row, seed=99, position=position) for position in range(count)])
    weights = kept_weights(logits[0], row).double()
    wanted = weights / weights.sum() * count
    found = torch.bincount(torch.tensor(drawn), minlength=8).double()
    statistic = float(((found - wanted).square() / wanted).sum())
    assert statistic < 40, f"{statistic:.1f}"


def arguments(count: int = 2) -> dict[str, Any]:
    ones = torch.ones(count)
    whole = torch.zeros(count, dtype=torch.int64)
    rows = SamplingRows(ones, whole.int(), ones.double(), ones.clone(), whole, whole.clone())
    return {"logits": torch.zeros(count, 10), "rows": rows}


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("logits", {"logits": torch.zeros(2, 10, dtype=torch.float64)}),
        ("logits", {"logits": torch.zeros(10)}),
        ("logits", {"logits": torch.zeros(2, 0)}),
        ("logits", {"logits": torch.zeros(10, 2).T}),
        ("attempt", {"attempt": -1}),
        ("tokens", {"tokens": torch.zeros(2)}),
        ("temperatures", {"temperatures": torch.ones(3)}),
        ("top_k", {"top_k": torch.ones(2)}),
        ("top_p", {"top_p": torch.ones(2)}),
        ("min_p", {"min_p": torch.ones(4)[::2]}),
        ("seeds", {"seeds": torch.ones(2, dtype=torch.int32)}),
        ("positions", {"positions": torch.ones(2)}),
    ],
)
def test_what_the_kernel_cannot_take_is_refused_by_name(argument: str, change: dict[str, Any]) -> None:
    given = arguments()
    of_rows = {name: value for name, value in change.items() if hasattr(given["rows"], name)}
    given |= {name: value for name, value in change.items() if name not in of_rows}
    given["rows"] = replace(given["rows"], **of_rows)
    with pytest.raises(KernelArgumentError) as caught:
        sample_tokens(**given)
    assert caught.value.argument == argument


def test_no_rows_are_no_work() -> None:
    assert sample(torch.zeros(0, 10), []) == []


def test_production_starts_what_is_in_the_table() -> None:
    for dtype in (BF16, FP32):
        with recording_launches(executing=False) as launches:
            sample_tokens(torch.zeros(2, 10, dtype=dtype), arguments()["rows"])
        (launch,) = launches
        assert len(launch.variant_names()) == 1, f"{launch} is compiled in service"
