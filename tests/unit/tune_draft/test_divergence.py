"""The loss: a divergence of distributions, in which all tokens that are not known are one event."""

from __future__ import annotations

import pytest
import torch

from millstream_runtime.tune_draft.divergence import divergence

ROWS, VOCABULARY = 5, 12


@pytest.fixture
def target() -> torch.Tensor:
    return torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(0)).mul(2).log_softmax(-1)


@pytest.fixture
def draft() -> torch.Tensor:
    return torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(1)).mul(2)


def test_with_all_tokens_it_is_the_divergence(target: torch.Tensor, draft: torch.Tensor) -> None:
    logprobs, ids = target.topk(VOCABULARY, dim=-1)
    wanted = torch.nn.functional.kl_div(draft.log_softmax(-1), target, log_target=True, reduction="sum")
    assert float(divergence(draft, ids, logprobs)) == pytest.approx(float(wanted))


def test_with_some_tokens_it_is_that_of_the_coarser_distributions(target: torch.Tensor, draft: torch.Tensor) -> None:
    logprobs, ids = target.topk(4, dim=-1)
    known = target.exp().gather(1, ids), draft.softmax(-1).gather(1, ids)
    coarse = [torch.cat([p, 1 - p.sum(1, keepdim=True)], 1) for p in known]
    wanted = (coarse[0] * (coarse[0] / coarse[1]).log()).sum()
    found = divergence(draft, ids, logprobs)
    assert float(found) == pytest.approx(float(wanted), rel=1e-5)
    assert found < divergence(draft, *reversed(target.topk(VOCABULARY, dim=-1)))


def test_it_is_zero_with_a_finite_gradient_where_both_are_equal(target: torch.Tensor) -> None:
    logits = (target * 30).requires_grad_()  # nearly all of the probability is one token's
    logprobs, ids = logits.detach().log_softmax(-1).topk(4, dim=-1)
    found = divergence(logits, ids, logprobs)
    found.backward()  # type: ignore[no-untyped-call]
    assert found.item() == pytest.approx(0, abs=1e-4)
    assert logits.grad is not None
    assert logits.grad.abs().max() < 1e-3


def test_tokens_beyond_the_drafts_vocabulary_count_to_the_rest(target: torch.Tensor, draft: torch.Tensor) -> None:
    logprobs, ids = target.topk(4, dim=-1)
    moved = ids.clone()
    moved[:, 3] = VOCABULARY + 7
    wanted = divergence(draft, ids[:, :3], logprobs[:, :3])
    assert float(divergence(draft, moved, logprobs)) == pytest.approx(float(wanted))
