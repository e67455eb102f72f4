"""Norms, gates and rotations by the kernels compiled for a CPU, against the same mathematics in float64."""

from __future__ import annotations

import platform

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from millstream_kernels.arguments import KernelArgumentError
from millstream_kernels.cpu import code_folder, decode, layers
from millstream_kernels.cpu.loaded_code import LoadedCode
from millstream_kernels.cpu.task import ActivationKind

pytestmark = pytest.mark.skipif(
    code_folder.unsupported_machine(platform.system(), platform.machine(), code_folder.cpu_flags()) is not None,
    reason="the kernels are compiled for x86-64-v3 on Linux",
)
EPS = 1e-5


@pytest.fixture
def code() -> LoadedCode:
    return decode.load()


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.matrix("size")
@pytest.mark.parametrize("rows", [0, 1, 7, 400])
@pytest.mark.parametrize("size", [1, 7, 64, 576])
@pytest.mark.parametrize("magnitude", [1e-4, 1.0, 1e4])  # eps rules the smallest, and nothing overflows
def test_rows_are_normed(code: LoadedCode, rows: int, size: int, magnitude: float) -> None:
    x, weight = (drawn(rows, size) + 3.0) * magnitude, drawn(size, seed=1)
    expected = F.rms_norm(x.double(), (size,), weight.double(), EPS).float()
    torch.testing.assert_close(layers.rms_norm(code, x, weight, EPS), expected, rtol=2e-6, atol=1e-6)


def test_rows_with_gaps_and_more_dimensions_are_normed(code: LoadedCode) -> None:
    x, weight = drawn(4, 3, 50)[..., 10:42], drawn(32, seed=1)
    normed = layers.rms_norm(code, x, weight, EPS)
    assert normed.shape == x.shape
    torch.testing.assert_close(normed, F.rms_norm(x, (32,), weight, EPS), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("kind", list(ActivationKind))
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (1, 1024), (5, 7), (300, 512)])
def test_gates_weigh_ups(code: LoadedCode, kind: ActivationKind, rows: int, size: int) -> None:
    x = drawn(rows, 2 * size) * 8  # where e ** -x would overflow, too
    x[0, 0] = 100.0
    x[-1, size - 1] = -100.0
    gates, ups = x.double().chunk(2, dim=-1)
    activated = F.silu(gates) if kind is ActivationKind.SILU else F.gelu(gates, approximate="tanh")
    torch.testing.assert_close(layers.gated_activation(code, x, kind), (activated * ups).float(), rtol=2e-6, atol=1e-6)


class Tokens:
    """Queries, keys and values of tokens that go to scattered places of a pool."""

    def __init__(self, tokens: int, heads: int, kv_heads: int, size: int, rotary: int, *, is_normed: bool) -> None:
        generator = torch.Generator().manual_seed(2)
        self.heads, self.kv_heads, self.pairs = heads, kv_heads, rotary // 2
        self.qkv = drawn(tokens, heads + 2 * kv_heads, size)
        angle = drawn(50, self.pairs, seed=3)
        self.angles = angle.cos(), angle.sin()
        self.positions = torch.randint(0, 50, (tokens,), generator=generator)
        self.slots = torch.randperm(tokens + 9, generator=generator)[:tokens]
        self.pool = torch.full((2 * kv_heads, tokens + 9, size), 7.0)
        self.weight = drawn(heads + kv_heads, size, seed=4) if is_normed else None

    def write(self, code: LoadedCode) -> Tensor:
        return layers.rope_kv_write(
            code, self.qkv, self.heads, self.angles, self.positions, self.slots, self.pool, self.weight, EPS
        )

    def expected(self) -> tuple[Tensor, Tensor]:
        """Queries and the pool, in float64 until the end."""
        rotated = self.qkv.double()
        turned = rotated[:, : self.heads + self.kv_heads]
        if self.weight is not None:
            turned.copy_(F.rms_norm(turned, turned.shape[2:], None, EPS) * self.weight)
        cos, sin = (one.double()[self.positions].unsqueeze(1) for one in self.angles)
        first, second = turned[..., : self.pairs].clone(), turned[..., self.pairs : 2 * self.pairs].clone()
        turned[..., : self.pairs] = first * cos - second * sin
        turned[..., self.pairs : 2 * self.pairs] = second * cos + first * sin
        pool = torch.full(self.pool.shape, 7.0)
        pool[:, self.slots] = rotated[:, self.heads :].transpose(0, 1).float()
        return rotated[:, : self.heads].float(), pool


@pytest.mark.matrix("is_normed", "heads")
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "rotary"), [(8, 4, 64, 64), (3, 3, 40, 20), (7, 1, 6, 6), (2, 1, 96, 96)]
)
@pytest.mark.parametrize("tokens", [1, 5, 130])
def test_heads_turn_and_are_stored(
    code: LoadedCode, tokens: int, heads: int, kv_heads: int, size: int, rotary: int, is_normed: bool
) -> None:
    case = Tokens(tokens, heads, kv_heads, size, rotary, is_normed=is_normed)
    queries, pool = case.expected()
    torch.testing.assert_close(case.write(code), queries, rtol=5e-6, atol=2e-6)
    torch.testing.assert_close(case.pool, pool, rtol=5e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_normed", [False, True])
def test_a_pool_of_16_bits_holds_the_same_numbers_rounded_once(
    code: LoadedCode, dtype: torch.dtype, is_normed: bool
) -> None:
    """As torch rounds them, half to even; also those beyond the type, subnormal ones and NaN."""
    wide, narrow = (Tokens(130, 4, 2, 40, 20, is_normed=is_normed) for _ in range(2))
    for case in (wide, narrow):
        case.qkv[::3] *= torch.arange(-26.0, 18.0).exp2()[:, None, None]  # 44 tokens
        case.qkv[5, 5:, 3], case.qkv[8, 7, 1] = torch.nan, torch.inf
        case.qkv[6, -1, :4] = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11])  # ties
    narrow.pool = narrow.pool.to(dtype)
    assert torch.equal(wide.write(code).nan_to_num(), narrow.write(code).nan_to_num())
    assert torch.equal(narrow.pool.isnan(), wide.pool.isnan())
    assert torch.equal(narrow.pool.nan_to_num(), wide.pool.to(dtype).nan_to_num())


def test_a_row_knows_neither_its_company_nor_the_threads(code: LoadedCode) -> None:
    """Of any number of tokens, on one thread or a team."""
    before = torch.get_num_threads()
    alone = Tokens(130, 8, 4, 64, 64, is_normed=True)
    x, weight, gates = drawn(300, 576), drawn(576, seed=1), drawn(130, 1024)
    try:
        torch.set_num_threads(1)
        rotated = alone.write(code)
        normed = torch.cat([layers.rms_norm(code, row[None], weight, EPS) for row in x])
        gated = torch.cat([layers.gated_activation(code, row[None], ActivationKind.SILU) for row in gates])
        torch.set_num_threads(3)
        together = Tokens(130, 8, 4, 64, 64, is_normed=True)
        assert torch.equal(together.write(code), rotated)
        assert torch.equal(together.pool, alone.pool)
        assert torch.equal(layers.rms_norm(code, x, weight, EPS), normed)
        assert torch.equal(layers.gated_activation(code, gates, ActivationKind.SILU), gated)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("wrong", ["slot", "position", "negative slot"])
def test_a_token_without_a_place_touches_nothing(code: LoadedCode, wrong: str) -> None:
    case = Tokens(3, 2, 1, 8, 8, is_normed=False)
    before = case.pool.clone()
    if wrong == "position":
        case.positions[1] = 50
    else:
        case.slots[1] = case.pool.shape[1] if wrong == "slot" else -1
    queries = case.write(code)
    assert queries[1].isnan().all()
    assert queries[[0, 2]].isfinite().all()
    changed = {*(case.pool != before).any(dim=2).any(dim=0).nonzero().flatten().tolist()}
    assert changed == {*case.slots[[0, 2]].tolist()}


def test_nan_stays_in_its_row(code: LoadedCode) -> None:
    x = drawn(3, 8)
    x[1, 4] = torch.nan
    assert layers.rms_norm(code, x, torch.ones(8), EPS).isnan().any(dim=1).tolist() == [False, True, False]
    gated = layers.gated_activation(code, x, ActivationKind.GELU_TANH)
    assert gated.isnan().sum(dim=1).tolist() == [0, 1, 0]


def test_what_the_kernels_do_not_take_is_refused_by_name(code: LoadedCode) -> None:
    x, weight = drawn(2, 8), drawn(8)
    with pytest.raises(KernelArgumentError, match="x has rows of 8 numbers, and the weight has 4"):
        layers.rms_norm(code, x, weight[:4], EPS)
    with pytest.raises(KernelArgumentError, match="weight is not float32"):
        layers.rms_norm(code, x, weight.double(), EPS)
    with pytest.raises(KernelArgumentError, match="rows of 7 numbers, which are not a gate and an up"):
        layers.gated_activation(code, x[:, :7], ActivationKind.SILU)
    case = Tokens(3, 2, 1, 8, 8, is_normed=False)
    case.slots = case.slots.int()
    with pytest.raises(KernelArgumentError, match=r"slots are not int64 \[3\]"):
        case.write(code)
    case = Tokens(3, 2, 1, 8, 8, is_normed=False)
    case.pool = case.pool[:, :, :6].contiguous()
    with pytest.raises(KernelArgumentError, match="pool is"):
        case.write(code)
    case.pool = case.pool.double()
    with pytest.raises(KernelArgumentError, match="pool is not float32, bfloat16 or float16"):
        case.write(code)
