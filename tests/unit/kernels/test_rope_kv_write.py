"""Rotation and the write into the pool in one kernel: the engine's numbers and codes, layouts, padding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from millstream_kernels.arguments import KernelArgumentError
from millstream_kernels.elementwise.rope_kv_write import HeadNorm, PagedPool, Rotary, rope_kv_write
from millstream_kernels.stored_as import StoredAs
from millstream_runtime.engine.kv.layer_pool import Fp8Pool, Int8Pool, LayerPool, PlainPool
from tests.support.kernel_launches import recording_launches
from tests.support.triton_interpreter import interpreting

pytestmark = pytest.mark.usefixtures("interpreter")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SLOTS, POSITIONS = 40, 50


@dataclass(frozen=True)
class Heads:
    """Some tokens of a model, and where they go."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    rotary_dim: int = 64
    dtype: torch.dtype = BF16
    interleaved: bool = False
    eps: float | None = None  # of a QK norm
    tokens: int = 3

    @property
    def qkv(self) -> Tensor:
        """With gaps between heads and tokens, which are NaN."""
        heads = self.num_heads + 2 * self.num_kv_heads
        memory = torch.full((self.tokens, heads + 1, self.head_dim + 8), torch.nan, dtype=self.dtype)
        memory[:, :heads, : self.head_dim] = numbers(1, self.tokens, heads, self.head_dim) * 2
        return memory[:, :heads, : self.head_dim]

    @property
    def rotary(self) -> Rotary:
        half = self.rotary_dim // 2
        powers = 10000.0 ** (-torch.arange(half) / half)
        angles = torch.outer(torch.arange(POSITIONS), powers)
        return Rotary(angles.cos(), angles.sin(), self.interleaved)

    @property
    def norm(self) -> HeadNorm | None:
        if self.eps is None:
            return None
        weight = 1 + numbers(2, self.num_heads + self.num_kv_heads, self.head_dim) / 4
        return HeadNorm(weight.to(self.dtype), self.eps)

    @property
    def positions(self) -> Tensor:
        return torch.tensor([POSITIONS - 1, 0, 7, 21])[: self.tokens]

    @property
    def slots(self) -> Tensor:
        return torch.tensor([5, SLOTS - 1, 0, 17])[: self.tokens]

    def pool(self, stored_as: StoredAs = StoredAs.NUMBERS) -> PagedPool:
        """Everything in it is what no number becomes."""
        shape = (2 * self.num_kv_heads, SLOTS, self.head_dim)
        if stored_as == StoredAs.NUMBERS:
            return PagedPool(torch.full(shape, torch.nan, dtype=self.dtype))
        if stored_as == StoredAs.INT8:
            return PagedPool(torch.full(shape, -128, dtype=torch.int8), torch.full(shape[:2], torch.nan, dtype=FP16))
        return PagedPool(torch.full(shape, 0x7F, dtype=torch.uint8), torch.linspace(0.01, 0.3, shape[0]))

    def turned(self, dtype: torch.dtype) -> Tensor:
        """Queries and keys, computed in `dtype` by the mathematics: float64 is the truth."""
        heads = self.qkv[:, : self.num_heads + self.num_kv_heads].to(dtype)
        if self.norm is not None:
            mean = heads.square().mean(-1, keepdim=True)
            # The model rounds here, and so do kernel and truth.
            heads = (heads / (mean + self.norm.eps).sqrt() * self.norm.weight.to(dtype)).to(self.dtype).to(dtype)
        turning, rest = heads[..., : self.rotary_dim], heads[..., self.rotary_dim :]
        cos, sin = (one[self.positions][:, None].to(dtype) for one in (self.rotary.cos, self.rotary.sin))
        if self.interleaved:
            x, y = turning[..., 0::2], turning[..., 1::2]
            turned = torch.stack((x * cos - y * sin, y * cos + x * sin), -1).flatten(-2)
        else:
            x, y = turning.chunk(2, -1)
            turned = torch.cat((x * cos - y * sin, y * cos + x * sin), -1)
        return torch.cat((turned, rest), -1)


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(case: Heads, pool: PagedPool, slots: Tensor | None = None) -> Tensor:
    """Into a query that is NaN beforehand."""
    query = torch.full((case.tokens, case.num_heads, case.head_dim), torch.nan, dtype=case.dtype)
    slots = case.slots if slots is None else slots
    return rope_kv_write(
        case.qkv, case.num_heads, case.rotary, case.positions, slots, pool, norm=case.norm, query=query
    )


SWEEP = [
    Heads(),
    Heads(7, 1, 128, 128, FP16),  # a group of 7
    Heads(3, 3, 80, 32, BF16),  # partial, and no power of two
    Heads(4, 2, 64, 64, FP32, interleaved=True),
    Heads(12, 2, 96, 24, BF16, interleaved=True),  # partial
    Heads(4, 2, 64, 64, BF16, eps=1e-6),
    Heads(2, 1, 256, 256, FP16, eps=1e-5),
    Heads(4, 4, 48, 16, FP32, interleaved=True, eps=1e-6),
]


@pytest.mark.parametrize("case", SWEEP, ids=str)
def test_queries_and_keys_turn_and_values_do_not(case: Heads) -> None:
    pool = case.pool()
    query = run(case, pool)
    keys = pool.stored[: case.num_kv_heads, case.slots].transpose(0, 1)
    result = torch.cat((query, keys), 1)
    truth = case.turned(torch.float64)
    assert result.isfinite().all()
    # One rounding of the result; where heads are normed, another code may be the nearest before it, too.
    spacing = torch.finfo(case.dtype).eps * (0.51 if case.eps is None else 1.1)
    magnitude = case.turned(torch.float64).abs().amax(-1, keepdim=True)
    allowed = spacing * (truth.abs() if case.eps is None else magnitude) + 1e-6
    assert ((result.double() - truth).abs() <= allowed).all()
    values = case.qkv[:, case.num_heads + case.num_kv_heads :]
    assert torch.equal(pool.stored[case.num_kv_heads :, case.slots].transpose(0, 1), values)


def test_nothing_else_of_the_pool_changes() -> None:
    case = Heads()
    pool = case.pool()
    run(case, pool)
    others = [slot for slot in range(SLOTS) if slot not in case.slots.tolist()]
    assert pool.stored[:, others].isnan().all()


@pytest.mark.parametrize("stored_as", StoredAs)
def test_a_slot_below_0_is_skipped(stored_as: StoredAs) -> None:
    """Trap: a padded row of a graph has slot -1; Python's last slot would be overwritten."""
    case = Heads()
    pool, slots = case.pool(stored_as), torch.tensor([5, -1, -1])
    query = run(case, pool, slots)
    assert query.isfinite().all()
    untouched = case.pool(stored_as)
    others = [slot for slot in range(SLOTS) if slot != 5]
    for stored, before in ((pool.stored, untouched.stored), (pool.scales, untouched.scales)):
        if stored is None or before is None or stored.dim() == 1:
            continue
        torch.testing.assert_close(stored[:, others], before[:, others], rtol=0, atol=0, equal_nan=True)


def engines_pool(pool: PagedPool, dtype: torch.dtype) -> LayerPool:
    if pool.stored_as == StoredAs.INT8:
        assert pool.scales is not None
        return Int8Pool(pool.stored, pool.scales, dtype)
    if pool.stored_as == StoredAs.E4M3:
        assert pool.scales is not None
        return Fp8Pool(pool.stored, dtype, pool.scales[:, None, None])
    return PlainPool(pool.stored)


@pytest.mark.parametrize("stored_as", [StoredAs.INT8, StoredAs.E4M3])
@pytest.mark.parametrize("case", [Heads(), Heads(3, 2, 80, 32, FP32, eps=1e-6, tokens=4)], ids=str)
def test_codes_are_those_of_the_engines_pool(case: Heads, stored_as: StoredAs) -> None:
    plain = case.pool()
    run(case, plain)
    expected, result = case.pool(stored_as), case.pool(stored_as)
    engines_pool(expected, case.dtype).write(case.slots, plain.stored[:, case.slots].transpose(0, 1))
    run(case, result)
    assert torch.equal(result.stored, expected.stored)
    if stored_as == StoredAs.INT8:
        torch.testing.assert_close(result.scales, expected.scales, rtol=0, atol=0, equal_nan=True)


def test_a_token_of_zeros_and_one_with_nan_leave_the_others_alone() -> None:
    case = Heads()
    clean = case.pool(StoredAs.INT8)
    run(case, clean)
    qkv, pool = case.qkv.clone(), case.pool(StoredAs.INT8)
    qkv[0], qkv[1, :, 3] = 0, torch.nan
    rope_kv_write(qkv, case.num_heads, case.rotary, case.positions, case.slots, pool)
    assert pool.scales is not None
    assert clean.scales is not None
    assert not pool.stored[:, case.slots[0]].any()
    assert (pool.scales[:, case.slots[0]] == 0).all()
    assert pool.scales[:, case.slots[1]].isnan().all()
    assert torch.equal(pool.stored[:, case.slots[2]], clean.stored[:, case.slots[2]])


def test_a_token_has_one_result_alone_and_in_company() -> None:
    case = Heads(eps=1e-6)
    pool = case.pool()
    together = run(case, pool)
    alone = case.pool()
    query = rope_kv_write(
        case.qkv[2:].clone(), 4, case.rotary, case.positions[2:].clone(), case.slots[2:].clone(), alone, norm=case.norm
    )
    assert torch.equal(query[0], together[2])
    assert torch.equal(alone.stored[:, case.slots[2]], pool.stored[:, case.slots[2]])


def test_indices_beyond_two_to_the_31_are_computed_in_64_bits(tmp_path: Path) -> None:
    """Heads of the pool so far apart that their distance is no int32, in a file with holes."""
    case, far = Heads(2, 1, 64, 64, FP16), (1 << 31) + 64
    memory = torch.from_file(str(tmp_path / "pool"), shared=True, size=far + SLOTS * 64, dtype=FP16)
    pool = PagedPool(memory.as_strided((2, SLOTS, 64), (far, 64, 1)))
    expected = case.pool()
    run(case, expected)
    with interpreting(checking_overflow=True):
        run(case, pool)
    assert torch.equal(pool.stored[:, case.slots], expected.stored[:, case.slots])


def test_no_tokens_are_no_work() -> None:
    case = Heads(tokens=0)
    assert run(case, case.pool()).shape == (0, 4, 64)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("qkv", {"qkv": torch.zeros(3, 8, 64, dtype=torch.float64)}),
        ("qkv", {"qkv": torch.zeros(3, 8, 72, dtype=BF16)}),
        ("qkv", {"qkv": torch.zeros(3, 8, 68, dtype=BF16)[..., :64]}),
        ("num_heads", {"num_heads": 3}),
        ("num_heads", {"num_heads": 8}),
        ("cos", {"rotary": Rotary(torch.zeros(9, 40), torch.zeros(9, 40))}),
        ("sin", {"rotary": Rotary(torch.zeros(9, 32), torch.zeros(9, 32, dtype=BF16))}),
        ("sin", {"rotary": Rotary(torch.zeros(9, 32), torch.zeros(9, 64)[:, :32])}),
        ("positions", {"positions": torch.zeros(2, dtype=torch.int64)}),
        ("slots", {"slots": torch.zeros(3)}),
        ("pool", {"pool": PagedPool(torch.zeros(4, SLOTS, 64, dtype=FP16))}),
        ("pool", {"pool": PagedPool(torch.zeros(6, SLOTS, 64, dtype=BF16))}),
        ("pool", {"pool": PagedPool(torch.zeros(4, SLOTS, 64, dtype=torch.int8))}),
        ("pool", {"pool": PagedPool(torch.zeros(4, SLOTS, 64, dtype=torch.int8), torch.zeros(4, SLOTS))}),
        ("pool", {"pool": PagedPool(torch.zeros(4, SLOTS, 64, dtype=torch.uint8), torch.zeros(2))}),
        ("norm", {"norm": HeadNorm(torch.zeros(4, 64, dtype=BF16), 1e-6)}),
        ("query", {"query": torch.zeros(3, 4, 64)}),
    ],
)
def test_what_the_kernel_cannot_take_is_refused_by_name(argument: str, change: dict[str, Any]) -> None:
    case = Heads()
    arguments: dict[str, Any] = {
        "qkv": case.qkv,
        "num_heads": 4,
        "rotary": case.rotary,
        "positions": case.positions,
        "slots": case.slots,
        "pool": case.pool(),
    }
    with pytest.raises(KernelArgumentError) as caught:
        rope_kv_write(**(arguments | change))
    assert caught.value.argument == argument


def test_production_starts_what_is_in_the_table() -> None:
    heads = [Heads(head_dim=one, rotary_dim=one) for one in (64, 128)]
    heads += [Heads(head_dim=one, rotary_dim=one, eps=1e-6) for one in (128, 256)]
    cases = [(one, StoredAs.NUMBERS) for one in heads] + [(heads[1], StoredAs.INT8), (heads[1], StoredAs.E4M3)]
    for case, stored_as in cases:
        with recording_launches(executing=False) as launches:
            run(replace(case), case.pool(stored_as))
        (launch,) = launches
        assert len(launch.variant_names()) == 1, f"{launch} is compiled in service"
