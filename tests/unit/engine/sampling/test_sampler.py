"""The sampler draws from the distribution it is given, and from nothing outside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from millstream_runtime.engine.request import SamplingParams
from millstream_runtime.engine.sampling.logits_processors import apply_all
from millstream_runtime.engine.sampling.logprobs import Described, log_softmax
from millstream_runtime.engine.sampling.sampler import SamplingRow, greedy, sample, uniform
from millstream_runtime.engine.sampling.token_counts import History, TokenCounts

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5, -3.0, 0.5, 0.0])


def draw(params: SamplingParams, count: int = 4000) -> torch.Tensor:
    """How often each token came up, over consecutive positions of one seed."""
    rows = [SamplingRow(params, seed=42, position=position) for position in range(count)]
    return torch.bincount(sample(LOGITS.repeat(count, 1), rows), minlength=len(LOGITS)).double()


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities.double() * counts.sum()
    held = expected > 0
    assert counts[~held].sum() == 0, "a token of probability 0 came up"
    return float(((counts[held] - expected[held]) ** 2 / expected[held]).sum())


def test_temperature_follows_the_softmax() -> None:
    for temperature in (0.7, 1.0, 1.5):
        counts = draw(SamplingParams(max_tokens=1, temperature=temperature))
        assert chi_square(counts, (LOGITS / temperature).softmax(0)) < 24.3  # 7 degrees of freedom, p = 0.001


def test_top_k_and_top_p_keep_the_right_tokens() -> None:
    kept = LOGITS.softmax(0)
    top3 = torch.zeros(8).index_fill(0, kept.topk(3).indices, 1.0) * kept
    counts = draw(SamplingParams(max_tokens=1, temperature=1.0, top_k=3))
    assert chi_square(counts, top3 / top3.sum()) < 13.8
    # 0.402 + 0.244 < 0.7 <= 0.402 + 0.244 + 0.148: the smallest set that reaches 0.7 has three tokens.
    counts = draw(SamplingParams(max_tokens=1, temperature=1.0, top_p=0.7))
    assert chi_square(counts, top3 / top3.sum()) < 13.8
    assert draw(SamplingParams(max_tokens=1, temperature=1.0, top_p=1e-6))[0] == 4000


def test_min_p_keeps_what_is_likely_enough_beside_the_best() -> None:
    kept = LOGITS.softmax(0)
    above = torch.where(kept >= 0.3 * kept.max(), kept, 0.0)  # 2.0, 1.5 and 1.0
    assert (above > 0).sum() == 3
    counts = draw(SamplingParams(max_tokens=1, temperature=1.0, min_p=0.3))
    assert chi_square(counts, above / above.sum()) < 13.8
    assert draw(SamplingParams(max_tokens=1, temperature=2.0, min_p=1.0))[0] == 4000


def changed(params: SamplingParams, prompt: Sequence[int] = (), answer: Sequence[int] = ()) -> torch.Tensor:
    """LOGITS after everything that a request may do to them, beside a neighbour that asks for nothing."""
    logits = LOGITS.repeat(2, 1)
    history = History(3, 0, [*prompt, *answer], len(prompt), params.repetition_penalty != 1.0)
    rows = [SamplingRow(SamplingParams(max_tokens=1), 0, 0), SamplingRow(params, 0, 0, history=history)]
    apply_all(logits, rows, TokenCounts(4, logits.device).select([history]))
    assert torch.equal(logits[0], LOGITS)
    return logits[1]


def test_penalties_follow_openais_and_ctrls_formulas() -> None:
    tokens = [1, 0], [0, 3, 0, 0]  # token 1 is in the prompt only
    presence = changed(SamplingParams(max_tokens=1, presence_penalty=0.5), *tokens)
    assert torch.allclose(presence - LOGITS, torch.tensor([-0.5, 0, 0, -0.5, 0, 0, 0, 0]))
    frequency = changed(SamplingParams(max_tokens=1, frequency_penalty=0.5), *tokens)
    assert torch.allclose(frequency - LOGITS, torch.tensor([-1.5, 0, 0, -0.5, 0, 0, 0, 0]))
    repetition = changed(SamplingParams(max_tokens=1, repetition_penalty=2.0), *tokens)
    assert repetition.tolist() == [1.0, 0.5, 0.0, -2.0, 1.5, -3.0, 0.5, 0.0]


def test_a_bias_is_added_to_the_logits_it_names() -> None:
    biased = changed(SamplingParams(max_tokens=1, logit_bias=((5, 100.0), (0, -100.0))))
    assert biased.tolist() == [-98.0, 1.0, 0.0, -1.0, 1.5, 97.0, 0.5, 0.0]


def test_small_penalties_count_in_bfloat16() -> None:
    """Near 20 bfloat16 has steps of 0.125: what is taken off must not be rounded away."""
    logits = torch.tensor([[20.0, 19.875, 3.0]]).bfloat16()
    history = History(0, 0, [2, 0], 1, False)
    params = SamplingParams(1, temperature=0.0, frequency_penalty=0.05, logit_bias=((0, -0.08),))
    assert sample(logits, [SamplingRow(params, 0, 0, history=history)], TokenCounts(1, logits.device)).item() == 1


def test_bfloat16_logits_give_the_tokens_of_the_same_logits_in_float32() -> None:
    """Temperature and softmax round nothing more than the model did."""
    logits = (torch.randn(2000, 64, generator=torch.Generator().manual_seed(1)) * 8).bfloat16()
    rows = [SamplingRow(SamplingParams(1, temperature=2.0, top_p=0.99), 42, position) for position in range(2000)]
    assert torch.equal(sample(logits.clone(), rows), sample(logits.float(), rows))


def test_a_processor_sees_the_answer_so_far_and_decides() -> None:
    seen: list[list[int]] = []

    def only_six(logits: torch.Tensor, generated_ids: Sequence[int]) -> None:
        seen.append(list(generated_ids))
        logits[torch.arange(8) != 6] = float("-inf")

    row = SamplingRow(SamplingParams(max_tokens=1), 0, 0, generated_ids=[4, 2], processors=[only_six])
    assert sample(LOGITS[None].clone(), [row])[0] == 6
    assert seen == [[4, 2]]


def test_logprobs_name_the_token_its_rank_and_the_best() -> None:
    exact = LOGITS.log_softmax(0)
    first, second = Described(log_softmax(LOGITS.repeat(2, 1)), torch.tensor([1, 0]), [2, 0]).entries()
    assert (first.token_id, first.rank, second.rank, second.top) == (1, 3, 1, ())
    assert abs(first.logprob - float(exact[1])) < 1e-6
    assert [token_id for token_id, _ in first.top] == [0, 4]
    assert abs(first.top[1][1] - float(exact[4])) < 1e-6


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    rows = [
        SamplingRow(SamplingParams(max_tokens=1, temperature=temperature, top_k=top_k), seed=1, position=position)
        for position, (temperature, top_k) in enumerate([(0.0, 0), (1.0, 0), (1.0, 2), (0.0, 5)])
    ]
    tokens = sample(LOGITS.repeat(4, 1), rows)
    assert tokens[0] == tokens[3] == 0
    for index, row in enumerate(rows):
        assert sample(LOGITS[None].clone(), [row])[0] == tokens[index]


def test_suppressed_ids_do_not_come_up_and_tiny_temperatures_are_finite() -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0)
    assert sample(LOGITS[None].clone(), [SamplingRow(params, 0, 0, frozenset({0, 4}))])[0] == 1
    assert draw(SamplingParams(max_tokens=1, temperature=1e-30), count=10)[0] == 10


def test_rows_that_are_not_numbers_are_told_apart() -> None:
    logits = torch.stack([LOGITS, torch.full((8,), float("nan")), LOGITS + float("inf")])
    rows = [SamplingRow(SamplingParams(max_tokens=1, temperature=t), 3, 5) for t in (1.0, 1.0, 0.0)]
    tokens = sample(logits, rows)
    assert tokens[0] >= 0
    assert tokens[1:].tolist() == [-1, -1]
    assert greedy(logits) == [0, -1, -1]


def test_rows_that_are_not_numbers_are_told_apart_where_all_are_drawn() -> None:
    logits = torch.stack([LOGITS, torch.full((8,), float("nan")), LOGITS + float("inf"), LOGITS])
    rows = [SamplingRow(SamplingParams(max_tokens=1, top_p=p), 3, 5) for p in (0.9, 0.9, 1.0, 0.9)]
    tokens = sample(logits, rows).tolist()
    assert tokens[1:3] == [-1, -1]
    assert tokens[0] == tokens[3] >= 0


def test_uniform_numbers_are_uniform_and_differ_by_seed_and_position() -> None:
    numbers = torch.tensor([uniform(seed, position) for seed in range(100) for position in range(100)])
    counts = torch.histc(numbers, bins=20, min=0.0, max=1.0)
    assert float(((counts - 500) ** 2 / 500).sum()) < 43.8  # 19 degrees of freedom, p = 0.001
    assert len(set(numbers.tolist())) > 9_990
    assert uniform(-1, 0) != uniform(2**63, 0)


# Tokens that seeds give, so that an upgrade does not change the answers to seeded requests.
GOLDEN: dict[str, tuple[dict[str, Any], list[int]]] = {
    "temperature": ({"temperature": 0.9}, [1838, 1221, 12, 965, 153, 1499, 1410, 36, 1664, 1923, 399, 254]),
    "top_p": ({"top_p": 0.9}, [1838, 1228, 12, 965, 133, 1499, 1476, 30, 1679, 1923, 399, 279]),
    "low top_p": (
        {"top_p": 0.3, "temperature": 1.4},
        [1838, 1003, 370, 1160, 668, 1876, 1929, 1266, 1664, 1173, 1310, 1479],
    ),
    "top_k": ({"top_k": 20}, [1887, 1228, 15, 965, 69, 1499, 1384, 46, 1658, 1883, 399, 208]),
    "top_k and top_p": (
        {"top_k": 40, "top_p": 0.8, "temperature": 0.7},
        [1838, 971, 434, 965, 958, 1069, 995, 46, 1614, 685, 399, 199],
    ),
    "all filters": (
        {"top_k": 300, "top_p": 0.95, "min_p": 0.002, "temperature": 1.2},
        [1838, 1228, 12, 965, 133, 1518, 1512, 12, 1724, 1925, 479, 314],
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_a_seed_gives_the_tokens_that_it_always_gave(name: str) -> None:
    """Alone, and among rows that ask for other filters."""
    logits = torch.randn(12, 2000, generator=torch.Generator().manual_seed(11)) * 2.5
    asked, expected = GOLDEN[name]
    rows = [SamplingRow(SamplingParams(1, **asked), seed=77, position=position) for position in range(12)]
    assert sample(logits.clone(), rows).tolist() == expected
    others = [
        SamplingRow(SamplingParams(1, **GOLDEN[other][0]), seed=5, position=place) for place, other in enumerate(GOLDEN)
    ]
    company = torch.randn(len(others), 2000, generator=torch.Generator().manual_seed(12))
    mixed = sample(torch.cat([company, logits]), [*others, *rows]).tolist()
    assert mixed[len(others) :] == expected
