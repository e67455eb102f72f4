"""One bad request stays one: NaN in the KV blocks of a request ends that request with an error, and no other notices.

All ways to execute steps, over every kind of attention: full, windowed, capped, latent, with experts, and by
FlashAttention (its place taken by plain operations).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.execution.execution_mode import Execution
from millstream_runtime.engine.request import FinishReason, Request, TokenOutput
from tests.support import varlen_reference
from tests.support.eager_recorder import EagerRecorder
from tests.support.engines import MakeEngine, generate, greedy
from tests.support.family_cases import Models
from tests.support.small_pool import shrink_pool
from tests.support.ways import CROWDED, EXECUTIONS

pytestmark = pytest.mark.usefixtures("one_thread")
FAMILIES = ("llama", "mistral", "gemma2", "mixtral", "deepseek-v2")
WITH_EXPERTS = ("mixtral", "deepseek-v2")  # which rows an expert has is the host's decision: no tape holds it
MODES: dict[str, Callable[[], Execution | None]] = {**EXECUTIONS, **CROWDED}
PROMPT_LENGTHS, NEW_TOKENS = (3, 29, 17, 40, 8), 12
SICK = 2


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("families"))


def make_requests() -> list[Request]:
    rng = random.Random(4)
    prompts = [[rng.randrange(2, 90) for _ in range(length)] for length in PROMPT_LENGTHS]
    return [Request(str(index), prompt, greedy(NEW_TOKENS)) for index, prompt in enumerate(prompts)]


def answers_alone(engine: Engine) -> dict[str, list[int]]:
    return {name: ids for request in make_requests() for name, ids in generate(engine, [request]).items()}


@pytest.fixture(scope="module")
def alone(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, list[int]]]:
    from tests.support.tiny_families import make_engine as make

    known: dict[str, dict[str, list[int]]] = {}

    def answers(family: str) -> dict[str, list[int]]:
        if family not in known:
            known[family] = answers_alone(make(models.folder(family), enable_prefix_caching=False))
        return known[family]

    return answers


def poison_pool(engine: Engine) -> None:
    """As if every block had belonged to requests whose numbers went wrong, and who left unnoticed."""
    cache = engine._runner._forward._cache
    for layer in cache.layers:
        layer[: cache.num_blocks] = float("nan")


def poison(engine: Engine, request_id: str) -> None:
    """What the request has computed so far is NaN from now on."""
    sequence = engine._sequences[request_id]
    for layer in engine._runner._forward._cache.layers:
        layer[sequence.held_blocks] = float("nan")


def run(engine: Engine) -> list[TokenOutput]:
    outputs = []
    while engine.has_work():
        outputs += engine.step()
        engine.check_integrity()
    return outputs


def tokens_by_request(outputs: list[TokenOutput]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for one in outputs:
        found.setdefault(one.request_id, []).extend([] if one.token_id is None else [one.token_id])
    return found


@pytest.fixture(params=["own region", "as they come", "scattered"])
def make_bad_engine(
    request: pytest.FixtureRequest, make_engine: MakeEngine, models: Models
) -> Callable[[str, str], Engine]:
    """`make(family, mode)`: an engine on a pool of NaN, whose requests lie in their regions or anywhere."""

    def make(family: str, mode: str) -> Engine:
        folder: Path = models.folder(family)
        execution = MODES[mode]()
        if family in WITH_EXPERTS and execution is not None and execution.recorder is not None:
            execution = replace(execution, recorder=EagerRecorder())
        engine = make_engine(folder, execution=execution, enable_prefix_caching=False, kv_cache_memory_bytes=2 << 20)
        if request.param != "as they come":  # on a GPU rows have regions; of 18 blocks these are too small
            num_blocks = 18 if request.param == "scattered" else engine._blocks.num_blocks
            shrink_pool(engine, num_blocks, enable_prefix_caching=False)
        poison_pool(engine)
        return engine

    return make


@pytest.mark.matrix("family")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_others_do_not_notice(
    family: str,
    mode: str,
    make_bad_engine: Callable[[str, str], Engine],
    alone: Callable[[str], dict[str, list[int]]],
) -> None:
    expected, engine = alone(family), make_bad_engine(family, mode)
    for one in make_requests():
        engine.add_request(one)
    outputs: list[TokenOutput] = []
    while engine.has_work() and len(tokens_by_request(outputs).get(str(SICK), [])) < 3:
        outputs += engine.step()
    assert all(one.finish_reason is None for one in outputs), "stale numbers reached a request"
    poison(engine, str(SICK))
    outputs += run(engine)
    answers = tokens_by_request(outputs)
    sick = answers.pop(str(SICK))
    assert answers == {name: tokens for name, tokens in expected.items() if name != str(SICK)}
    assert sick == expected[str(SICK)][: len(sick)], "it ends, and says nothing wrong before"
    assert len(sick) < NEW_TOKENS
    (last,) = (one for one in outputs if one.request_id == str(SICK) and one.finish_reason is not None)
    assert (last.token_id, last.finish_reason) == (None, FinishReason.ERROR)
    assert last.error is not None
    assert "not finite" in last.error
    assert engine.stats().kv_blocks_used == 0
    assert generate(engine, make_requests()) == expected, "and the blocks are as good as new"


@pytest.mark.matrix("mode")
@pytest.mark.parametrize("mode", ["plain", "overlapped", "replayed", "replayed and overlapped"])
def test_others_do_not_notice_with_flash_attention(
    mode: str,
    make_bad_engine: Callable[[str, str], Engine],
    alone: Callable[[str], dict[str, list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    varlen_reference.use_reference(monkeypatch)
    test_others_do_not_notice("llama", mode, make_bad_engine, alone)


def test_log_probabilities_of_a_prompt_that_are_no_numbers_end_the_request(
    make_engine: MakeEngine, models: Models
) -> None:
    """Its windows have left the NaN behind by the first token, which is right; what was asked of the prompt is not."""
    engine = make_engine(models.folder("mistral"), max_num_batched_tokens=16)
    prompt = [random.Random(5).randrange(2, 90) for _ in range(100)]
    engine.add_request(Request("sick", prompt, replace(greedy(2), prompt_logprobs=1)))
    engine.step()
    engine.step()
    sequence = engine._sequences["sick"]
    for layer in engine._runner._forward._cache.layers:
        layer[sequence.block_table[(sequence.num_computed_tokens - 1) // 16]] = float("nan")
    assert [(one.token_id, one.finish_reason) for one in run(engine)] == [(None, FinishReason.ERROR)]
