"""The choice of threads is by what was measured, and never by too little of it."""

from __future__ import annotations

import pytest
import torch

from millstream_runtime.engine.cpu.threads import (
    BUDGET_SECONDS,
    BYTES_PER_THREAD,
    LEAST_SAMPLES,
    candidates,
    choose,
    measure,
    most_steps,
    reading,
)
from millstream_runtime.engine.device_policy import ThreadCounts


@pytest.mark.parametrize(("all_threads", "expected"), [(1, {1}), (2, {1, 2}), (6, {1, 2, 4, 6}), (8, {1, 2, 4, 8})])
def test_candidates(all_threads: int, expected: set[int]) -> None:
    assert set(candidates(all_threads)) == expected


def test_fewer_threads_are_taken_where_they_are_clearly_quicker() -> None:
    assert choose({2: [0.4, 0.5, 9.0], 1: [0.3, 0.2, 0.3]}, 2) == 1
    assert choose({4: [4.0, 4.0, 4.0], 2: [1.0, 1.0, 1.0], 1: [2.0, 2.0, 2.0]}, 4) == 2


def test_all_threads_are_kept_where_the_gain_is_within_the_noise_or_little_was_seen() -> None:
    assert choose({2: [0.30, 0.31, 0.30], 1: [0.29, 0.28, 0.29]}, 2) == 2
    assert choose({2: [0.4] * (LEAST_SAMPLES - 1), 1: [0.1] * LEAST_SAMPLES}, 2) == 2


def test_a_step_takes_the_threads_of_its_size() -> None:
    threads = ThreadCounts(8, ((4, 1), (32, 2)))
    assert [threads.of(num_tokens) for num_tokens in (1, 4, 5, 32, 33, 2048)] == [1, 1, 2, 2, 8, 8]
    assert threads.describe() == "1 up to 4 tokens a step, 2 up to 32 tokens a step, 8 beyond"


def test_measuring_takes_turns_ends_in_time_and_leaves_torch_as_it_was() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []
    now = [0.0]

    def step() -> None:
        seen.append(torch.get_num_threads())
        now[0] += BUDGET_SECONDS / 4.5

    try:
        seconds = measure(step, 2, lambda: now[0])
        assert seen == [2, 1, 2, 1, 2]
        assert {threads: len(samples) for threads, samples in seconds.items()} == {2: 3, 1: 2}
        assert torch.get_num_threads() == 2
        seen.clear()
        measure(lambda: seen.append(0), 2, lambda: 0.0)
        assert len(seen) == most_steps(2)
    finally:
        torch.set_num_threads(before)


def test_attention_takes_a_thread_for_each_piece_of_what_it_reads_and_none_less_than_the_step_has() -> None:
    before = torch.get_num_threads()
    try:
        for now, num_bytes, expected in ((1, 0, 1), (1, BYTES_PER_THREAD, 1), (1, 2 * BYTES_PER_THREAD, 2), (2, 0, 2)):
            torch.set_num_threads(now)
            with reading(num_bytes, all_threads=2):
                assert torch.get_num_threads() == expected
            assert torch.get_num_threads() == now
        torch.set_num_threads(1)
        with reading(100 * BYTES_PER_THREAD, all_threads=2):
            assert torch.get_num_threads() == 2, "and never more than there are"
    finally:
        torch.set_num_threads(before)
