"""Where a prompt's chunk is bounded in a plan, and that the bound changes no token of anybody."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream_runtime.config import Device, RuntimeConfig
from millstream_runtime.engine.block_manager import BlockManager
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.model_runner import Launched
from millstream_runtime.engine.request import Request, SamplingParams
from millstream_runtime.engine.scheduler import Chunk, Scheduler
from millstream_runtime.engine.sequence import Sequence
from tests.support.tiny_model import write_tiny_model


def sequence(arrival: int, num_tokens: int) -> Sequence:
    prompt = [arrival] * num_tokens
    return Sequence(Request(str(arrival), prompt, SamplingParams(100)), arrival, 0, list(prompt), num_tokens)


def sizes(chunks: list[Chunk]) -> list[int]:
    return [chunk.num_tokens for chunk in chunks]


def make_scheduler(*prompts: int) -> Scheduler:
    scheduler = Scheduler(BlockManager(1000, 16, 8, enable_prefix_caching=False), 512, 8)
    for arrival, num_tokens in enumerate(prompts):
        scheduler.add(sequence(arrival, num_tokens))
    return scheduler


def decode(scheduler: Scheduler, chunks: list[Chunk]) -> None:
    sampling = [chunk.sequence for chunk in chunks if chunk.samples]
    scheduler.advance(chunks)
    for one in sampling:
        one.append(7)


def test_prompts_share_the_bound_only_beside_a_decode() -> None:
    scheduler = make_scheduler(20)
    chunks = scheduler.schedule(max_prompt_tokens=8)
    assert sizes(chunks) == [20]  # nobody waits for a token: the whole budget is the prompt's
    decode(scheduler, chunks)
    scheduler.add(sequence(1, 300))
    scheduler.add(sequence(2, 300))
    chunks = scheduler.schedule(max_prompt_tokens=100)
    assert sizes(chunks) == [1, 100]  # the decode is never part of it, and the second prompt waits its turn
    decode(scheduler, chunks)
    chunks = scheduler.schedule(max_prompt_tokens=250)
    assert sizes(chunks) == [1, 200, 50]
    decode(scheduler, chunks)
    assert sizes(scheduler.schedule(max_prompt_tokens=None)) == [1, 1, 250]


def test_a_bound_above_the_budget_changes_nothing() -> None:
    scheduler = make_scheduler(20)
    decode(scheduler, scheduler.schedule())
    scheduler.add(sequence(1, 2000))
    assert sizes(scheduler.schedule(max_prompt_tokens=4000)) == [1, 511]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def test_a_long_prompt_enters_in_small_chunks_beside_answers_and_changes_none(folder: Path) -> None:
    """On a machine where a decode takes a second and a prompt's token a tenth of one."""

    def run(second_per_token: float) -> tuple[dict[str, list[int]], list[int]]:
        config = RuntimeConfig(
            model=str(folder), served_model_name="t", device=Device.CPU, kv_cache_memory_bytes=8 << 20
        )
        engine = Engine(config, lambda phase, message: None)
        now, prompt_sizes, launch = [0.0], [], engine._runner.launch

        def timed(chunks: list[Chunk]) -> Launched:
            in_prompts = sum(chunk.num_tokens for chunk in chunks if chunk.num_tokens > 1)
            prompt_sizes.append(in_prompts)
            now[0] += 1.0 + second_per_token * in_prompts
            return launch(chunks)

        engine._runner.launch = timed  # type: ignore[method-assign]
        engine.step_clock = lambda: now[0]
        answers: dict[str, list[int]] = {"a": [], "b": [], "long": []}
        long = Request("long", [index % 250 for index in range(600)], SamplingParams(5, 0.0, ignore_eos=True))
        for name in ("a", "b"):
            engine.add_request(Request(name, [1, 2, 3, ord(name)], SamplingParams(60, 0.0, ignore_eos=True)))
        while engine.has_work():
            if len(answers["a"]) == 10 and not answers["long"]:
                long_is_new = long.request_id not in engine._sequences
                if long_is_new:
                    engine.add_request(long)
            for output in engine.step():
                assert output.token_id is not None
                answers[output.request_id].append(output.token_id)
        engine.check_integrity()
        return answers, [size for size in prompt_sizes if size][1:]

    small_chunks, one_chunk = run(0.1), run(0.0)
    assert small_chunks[0] == one_chunk[0]
    assert max(small_chunks[1]) <= 32  # 4.2 seconds at most where a decode takes one
    assert sum(small_chunks[1]) == sum(one_chunk[1]) == 600
