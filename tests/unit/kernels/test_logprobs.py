"""Log-probabilities without a sort: the numbers of float64, ties, and rows that are not finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from millstream_kernels.arguments import KernelArgumentError
from millstream_kernels.sampling import logprobs
from millstream_kernels.sampling.logprobs import PLACES, TokenLogprobs, describe_tokens
from tests.support.kernel_launches import recording_launches

pytestmark = pytest.mark.usefixtures("interpreter")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel does not write is no number, and no token."""

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def empty(self, shape: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
            return torch.full((shape,) if isinstance(shape, int) else shape, -77, dtype=dtype, device=device)

    monkeypatch.setattr(logprobs, "torch", Torch())


def logits_of(count: int, size: int, dtype: torch.dtype = FP32) -> Tensor:
    """`[count, size]`, with a gap between rows that is more likely than all else."""
    memory = torch.full((count, size + 3), 1000.0, dtype=dtype)
    memory[:, :size] = torch.randn(count, size, generator=torch.Generator().manual_seed(size)) * 3
    return memory[:, :size]


def expected(logits: Tensor, tokens: Tensor, num_best: int) -> TokenLogprobs:
    """In float64, by a sort that leaves equal ones in their order."""
    wide = logits.double().log_softmax(-1)
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :num_best]
    own = logits.float().gather(1, tokens[:, None])
    ranks = (logits.float() > own).sum(-1) + 1
    return TokenLogprobs(wide.gather(1, tokens[:, None])[:, 0], ranks, wide.gather(1, order), order)


def same(found: TokenLogprobs, wanted: TokenLogprobs) -> None:
    assert found.ranks.tolist() == wanted.ranks.tolist()
    assert found.best_tokens.tolist() == wanted.best_tokens.tolist()
    for one, other in ((found.logprobs, wanted.logprobs), (found.best, wanted.best)):
        torch.testing.assert_close(one.double(), other, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("count", "size", "num_best", "dtype"),
    [(2, 2051, 20, FP32), (1, 1024, 0, FP32), (3, 7, 7, FP16), (2, 1500, PLACES, BF16), (1, 1, 1, FP32)],
)
def test_the_numbers_are_those_of_a_sort_in_float64(count: int, size: int, num_best: int, dtype: torch.dtype) -> None:
    logits = logits_of(count, size, dtype)  # in 16 bits many of them are equal
    tokens = torch.arange(count) * 31 % size
    before = logits.clone()
    same(describe_tokens(logits, tokens, num_best), expected(logits, tokens, num_best))
    assert torch.equal(logits, before)


def test_of_equal_logits_the_lower_token_comes_first_and_none_ranks_above_another() -> None:
    logits = torch.zeros(1, 1100)
    logits[0, ::3] = -0.0  # equals 0
    logits[0, [1090, 5]] = 2.0
    found = describe_tokens(logits, torch.tensor([77]), 6)
    assert found.best_tokens.tolist() == [[5, 1090, 0, 1, 2, 3]]
    assert found.ranks.tolist() == [3]


def test_masked_tokens_have_no_probability_and_come_last() -> None:
    logits = torch.full((1, 9), -INF)
    logits[0, 4], logits[0, 7] = -1e30, 3e38
    found = describe_tokens(logits, torch.tensor([2]), 4)
    assert found.best_tokens.tolist() == [[7, 4, 0, 1]]
    assert found.best[0].tolist() == [0.0, pytest.approx(-3e38), -INF, -INF]
    assert (found.logprobs.tolist(), found.ranks.tolist()) == ([-INF], [3])


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_row_that_is_not_finite_says_so_and_spoils_no_other(bad: float) -> None:
    logits = logits_of(3, 1030)
    logits[1, 1029] = bad
    if bad == -INF:
        logits[1] = bad
    tokens = torch.tensor([1, 2, 3])
    found, alone = describe_tokens(logits, tokens, 3), describe_tokens(logits[[0, 2]], tokens[[0, 2]], 3)
    assert found.logprobs[1].isnan()
    assert found.best[1].isnan().all()
    assert (int(found.ranks[1]), found.best_tokens[1].tolist()) == (1, [0, 1, 2])
    assert torch.equal(found.best[[0, 2]], alone.best), "a row has one result, whatever its company"
    assert torch.equal(found.logprobs[[0, 2]], alone.logprobs)


def test_a_large_offset_changes_nothing() -> None:
    """The highest goes first: exp(1000) has no float32."""
    logits = torch.randint(-8, 8, (1, 50)).float()
    one, other = (describe_tokens(logits + offset, torch.tensor([3]), 5) for offset in (0, 1000))
    assert torch.equal(one.best, other.best)


def test_no_rows_are_no_work() -> None:
    assert describe_tokens(torch.empty(0, 9), torch.empty(0, dtype=torch.int64), 4).best.shape == (0, 4)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("logits", {"logits": torch.zeros(2, 9, dtype=torch.float64)}),
        ("logits", {"logits": torch.zeros(2, 18)[:, ::2]}),
        ("logits", {"logits": torch.zeros(2, 0)}),
        ("tokens", {"tokens": torch.zeros(2, dtype=torch.int32)}),
        ("tokens", {"tokens": torch.zeros(4, dtype=torch.int64)[::2]}),
        ("num_best", {"num_best": 10}),
        ("num_best", {"num_best": 33, "logits": torch.zeros(2, 99)}),
        ("num_best", {"num_best": -1}),
    ],
)
def test_what_the_kernel_cannot_take_is_refused_by_name(argument: str, change: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {
        "logits": torch.zeros(2, 9),
        "tokens": torch.zeros(2, dtype=torch.int64),
        "num_best": 3,
    } | change
    with pytest.raises(KernelArgumentError) as caught:
        describe_tokens(**arguments)
    assert caught.value.argument == argument


def test_production_starts_what_is_in_the_table() -> None:
    for dtype in (BF16, FP32):
        logits = torch.zeros(4, 501, dtype=dtype)[1:]  # begins anywhere
        with recording_launches(executing=False) as launches:
            describe_tokens(logits, torch.zeros(4, dtype=torch.int64)[1:], 20)
        (launch,) = launches
        assert launch.variant_names() == ["bf16" if dtype == BF16 else "fp32"]
