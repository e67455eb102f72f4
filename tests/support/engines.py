"""Small random Llama folders, written by transformers, and engines on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from millstream_runtime.config import Device, GovernorMode, RuntimeConfig
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.execution.execution_mode import Execution
from millstream_runtime.engine.execution.rank_group import RankGroup
from millstream_runtime.engine.request import Request, SamplingParams
from millstream_runtime.engine.speculation.draft_model import DraftModelDrafter
from millstream_runtime.engine.speculation.drafter import Drafter
from millstream_runtime.engine.speculation.eagle import EagleDrafter

WriteModel = Callable[..., Path]
MakeEngine = Callable[..., Engine]


class EvenClock:
    """Each look at it takes a millisecond: which prompts share a step, and what is drafted, is the same on any machine.

    By a real one a test of chunks, preemptions or cache hits would have them or not by the speed of the machine.
    """

    def __init__(self) -> None:
        self._num_looks = 0

    def __call__(self) -> float:
        self._num_looks += 1
        return self._num_looks / 1000


@pytest.fixture(scope="session", autouse=True)
def _two_threads() -> None:
    torch.set_num_threads(2)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny products gain nothing from a second thread, and lose a lot to one that has to wait for a core."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def write_model(tmp_path_factory: pytest.TempPathFactory) -> WriteModel:
    """`write_model(**overrides)`: a folder with a seeded random Llama; the same overrides give the same folder."""
    made: dict[str, Path] = {}

    def write(**overrides: Any) -> Path:
        key = repr(sorted(overrides.items(), key=str))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("llama")
            shape = {
                "vocab_size": 199,
                "hidden_size": 48,
                "intermediate_size": 80,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 256,
                "initializer_range": 0.2,
                "bos_token_id": 0,
                "eos_token_id": 1,
                "tie_word_embeddings": False,
            } | overrides
            torch.manual_seed(1234)
            LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(made[key])
        return made[key]

    return write


@pytest.fixture
def make_engine() -> MakeEngine:
    """`make_engine(folder, **config)`: an engine on the CPU, with a pool of 1 MiB by default.

    `rank_group`: ranks that are running already. `execution`: how it computes, where it is not as a CPU does.
    `drafter`: what proposes tokens to it. The time that its steps take is that of an `EvenClock`.
    """

    def make(
        folder: Path,
        *,
        rank_group: RankGroup | None = None,
        execution: Execution | None = None,
        drafter: Drafter | None = None,
        **config: Any,
    ) -> Engine:
        settings = {"max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 20} | config
        if drafter is not None:  # what is proposed is checked, whatever it costs
            settings = {"speculation_governor": GovernorMode.DISABLED} | settings
        engine = Engine(
            RuntimeConfig(model=str(folder), served_model_name="test", device=Device.CPU, **settings),
            lambda phase, message: None,
            rank_group=rank_group,
            execution=execution,
            drafter=drafter,
        )
        measure_evenly(engine)
        return engine

    return make


def measure_evenly(engine: Engine) -> None:
    """Let no measured time decide what the engine does. See `EvenClock`."""
    engine.step_clock = EvenClock()
    drafter = None if engine._drafting is None else engine._drafting._drafter
    if isinstance(drafter, DraftModelDrafter | EagleDrafter):
        drafter._clock = EvenClock()


def greedy(max_tokens: int, **overrides: Any) -> SamplingParams:
    """Greedy sampling that ignores end-of-sequence by default."""
    return SamplingParams(**({"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True} | overrides))


def generate(engine: Engine, requests: list[Request]) -> dict[str, list[int]]:
    """Run requests to their end, all at once; every block must be back afterwards."""
    answers: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add_request(request)
    while engine.has_work():
        for output in engine.step():
            if output.token_id is not None:
                answers[output.request_id].append(output.token_id)
    engine.check_integrity()
    assert engine.stats().kv_blocks_used == 0
    return answers


def requests_for(prompts: list[list[int]], sampling: SamplingParams) -> list[Request]:
    """One request a prompt, named by its place."""
    return [Request(str(index), prompt, sampling) for index, prompt in enumerate(prompts)]
