"""A step checks several drafts of a request: fewer steps, the same tokens, and every limit holds within a run."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.execution.execution_mode import Execution
from millstream_runtime.engine.request import FinishReason, Request, SamplingParams, TokenOutput
from millstream_runtime.engine.scheduling import step_plan
from millstream_runtime.engine.speculation import drafting
from millstream_runtime.engine.speculation.drafter import Drafter
from tests.support.drafters import EachAlone, OftenRight, always, always_right, always_wrong, failing
from tests.support.drafting_engines import counts, skipped
from tests.support.eager_recorder import EagerRecorder
from tests.support.embedding import embedding_weight
from tests.support.engines import MakeEngine, WriteModel, generate, greedy
from tests.support.family_cases import LONGROPE, dense, rope
from tests.support.short_of_memory import ShortOfMemory
from tests.support.small_pool import shrink_pool
from tests.support.tiny_families import write_family

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.deep]
VOCABULARY, MOST_DRAFTS = 199, 4
PROMPT = tuple(random.Random(1).randrange(VOCABULARY) for _ in range(21))
SEEDED = SamplingParams(24, temperature=0.8, top_p=0.9, seed=5, ignore_eos=True)
Answer = list[int]


@pytest.fixture
def answer_of(write_model: WriteModel, make_engine: MakeEngine) -> Callable[[SamplingParams], Answer]:
    """The answer to PROMPT without drafts."""
    return lambda sampling: generate(make_engine(write_model()), [Request("0", PROMPT, sampling)])["0"]


def run(engine: Engine, *requests: Request) -> list[list[TokenOutput]]:
    """The outputs of each step, until all requests have ended."""
    for request in requests:
        engine.add_request(request)
    steps = []
    while engine.has_work():
        steps.append(engine.step())
        engine.check_integrity()
    assert engine.stats().kv_blocks_used == 0
    return steps


def test_right_drafts_give_five_tokens_a_step(
    write_model: WriteModel, make_engine: MakeEngine, answer_of: Callable[[SamplingParams], Answer]
) -> None:
    answer = answer_of(SEEDED)
    engine = make_engine(write_model(), drafter=always_right({PROMPT: answer}))
    steps = run(engine, Request("0", PROMPT, SEEDED))
    assert [one.token_id for outputs in steps for one in outputs] == answer
    assert [len(outputs) for outputs in steps] == [1, 5, 5, 5, 5, 3], "a step gives what is accepted and one more"
    assert [one.finish_reason for one in steps[-1]] == [None, None, FinishReason.LENGTH]
    found = counts(engine)
    assert (found.num_checks, found.num_draft_tokens, found.num_accepted_tokens) == (5, 18, 18)
    assert found.accepted_per_position == (5, 5, 4, 4)


@pytest.mark.quick
@pytest.mark.parametrize("sampling", [greedy(24), SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    "name", ["wrong", "same", "beyond", "negative", "no number", "too many", "for others", "fails"]
)
def test_a_bad_drafter_changes_no_token(
    name: str,
    sampling: SamplingParams,
    write_model: WriteModel,
    make_engine: MakeEngine,
    answer_of: Callable[[SamplingParams], Answer],
) -> None:
    answer = answer_of(sampling)
    no_numbers: list[Any] = ["7", None, 2.0, True]
    bad: dict[str, Drafter] = {
        "wrong": always_wrong({PROMPT: answer}, VOCABULARY),
        "same": always(answer[3]),
        "beyond": always(VOCABULARY),
        "negative": always(-1),
        "no number": EachAlone(lambda sequence, most: no_numbers[:most]),
        "too many": EachAlone(lambda sequence, most: [0] * 10_000),
        "for others": _ForOthers(),
        "fails": failing(ZeroDivisionError("a secret prompt")),
    }
    engine = make_engine(write_model(), drafter=bad[name])
    assert generate(engine, [Request("0", PROMPT, sampling)])["0"] == answer
    if name == "fails":
        assert skipped(engine) == {"drafter_failed": 23}
    if name == "wrong":
        assert counts(engine).num_accepted_tokens == 0
        assert counts(engine).num_checks == 22, "all but the first token, from the prompt, and the last, alone"


class _ForOthers:
    """Proposes for a request that it was asked about once, not for the one that it is asked about."""

    def __init__(self) -> None:
        self._first: Any = None

    def propose(self, wanted: Any) -> Any:
        self._first = self._first or next(iter(wanted))
        return {self._first: [1, 2, 3], object(): [4]}

    def forget(self, sequence: Any) -> None:
        raise RuntimeError("no")


def test_a_stop_token_ends_a_run(
    write_model: WriteModel, make_engine: MakeEngine, answer_of: Callable[[SamplingParams], Answer]
) -> None:
    answer = answer_of(SEEDED)
    place = next(index for index in range(3, 24) if answer[index] not in answer[:index])
    sampling = replace(SEEDED, stop_token_ids=frozenset({answer[place]}))
    engine = make_engine(write_model(), drafter=always_right({PROMPT: answer}))
    outputs = [one for step in run(engine, Request("0", PROMPT, sampling)) for one in step]
    assert [one.token_id for one in outputs] == answer[: place + 1]
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert not engine.has_work()


def test_min_tokens_holds_within_a_run(write_model: WriteModel, make_engine: MakeEngine) -> None:
    """The end comes up as soon as it may, and drafts reach over that place."""
    stops = frozenset(range(150))
    sampling = SamplingParams(30, temperature=1.0, seed=3, min_tokens=9, stop_token_ids=stops)
    expected = generate(make_engine(write_model()), [Request("0", PROMPT, sampling)])["0"]
    drafts = [*expected[:-1], *([expected[-1]] * 20)]
    for known in (expected, drafts, [7] * 30):
        engine = make_engine(write_model(), drafter=always_right({PROMPT: known}))
        assert generate(engine, [Request("0", PROMPT, sampling)])["0"] == expected
    assert len(expected) >= 9


def test_log_probabilities_are_those_without_drafts(write_model: WriteModel, make_engine: MakeEngine) -> None:
    sampling = replace(SEEDED, logprobs=3, prompt_logprobs=2, repetition_penalty=1.3, presence_penalty=0.2)
    request = Request("0", PROMPT, sampling)
    expected = [one for step in run(make_engine(write_model()), request) for one in step]
    answer = [one.token_id for one in expected if one.token_id is not None]
    drafter = OftenRight({PROMPT: answer}, VOCABULARY)
    engine = make_engine(write_model(), drafter=drafter)
    found = [one for step in run(engine, request) for one in step]
    assert [one.token_id for one in found] == answer
    assert 0 < counts(engine).num_accepted_tokens < counts(engine).num_draft_tokens
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs is not None
        assert other.logprobs is not None
        assert one.logprobs.rank == other.logprobs.rank
        assert [token for token, _ in one.logprobs.top] == [token for token, _ in other.logprobs.top]
        assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-4)
    assert found[0].prefill is not None
    assert all(one.prefill is None for one in found[1:])


def test_penalised_requests_of_any_kind_share_a_check(write_model: WriteModel, make_engine: MakeEngine) -> None:
    """Rows of checks, of decodes and without penalties, in one step; long answers, whose tokens take several chunks."""
    rng = random.Random(4)
    penalties: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.4},
        {"frequency_penalty": 0.7},
        {"presence_penalty": 1.0},
    ]
    requests = [
        Request(
            str(index),
            [rng.randrange(VOCABULARY) for _ in range(length)],
            SamplingParams(40, temperature=0.9 * (index % 2), seed=index, ignore_eos=True, **penalties[index % 4]),
        )
        for index, length in enumerate((2, 190, 30, 7, 11, 3, 50, 1))
    ]
    expected = generate(make_engine(write_model(), kv_cache_memory_bytes=4 << 20), requests)
    drafter = OftenRight.about(requests, expected, VOCABULARY)
    engine = make_engine(write_model(), kv_cache_memory_bytes=4 << 20, drafter=drafter)
    assert generate(engine, requests) == expected
    assert counts(engine).num_accepted_tokens > 20


class ForbidsRepeats:
    """A processor whose state follows from the answer so far."""

    def __init__(self, *, follows: bool) -> None:
        if follows:
            self.follows_generated_ids = True

    def __call__(self, logits: Tensor, generated_ids: Any) -> None:
        for token_id in generated_ids[-3:]:
            logits[token_id] = float("-inf")


@pytest.mark.parametrize("follows", [True, False])
def test_only_processors_that_follow_from_the_answer_draft(
    follows: bool, write_model: WriteModel, make_engine: MakeEngine
) -> None:
    def answers(drafter: Drafter | None) -> tuple[Answer, Engine]:
        engine = make_engine(write_model(), drafter=drafter)
        engine.processors_for = lambda request: (ForbidsRepeats(follows=follows),)
        return generate(engine, [Request("0", PROMPT, greedy(24))])["0"], engine

    expected, _ = answers(None)
    found, engine = answers(OftenRight({PROMPT: expected}, VOCABULARY))
    assert found == expected
    assert (counts(engine).num_accepted_tokens > 0) is follows
    assert (skipped(engine).get("logits_processors", 0) > 0) is not follows


def test_the_budget_goes_to_decodes_and_prompts_first(
    write_model: WriteModel, make_engine: MakeEngine, answer_of: Callable[[SamplingParams], Answer]
) -> None:
    answer = answer_of(greedy(24))
    engine = make_engine(
        write_model(), max_num_batched_tokens=16, max_num_seqs=4, drafter=always_right({PROMPT: answer, (5,): [0] * 99})
    )
    engine.add_request(Request("0", PROMPT, greedy(24)))
    engine.step()
    engine.step()  # the prompt, in two chunks
    engine.add_request(Request("long", [9] * 200, greedy(1)))
    seen = []
    while engine.has_work():
        outputs = engine.step()
        seen.append((engine.stats().last_step_tokens, [one.request_id for one in outputs].count("0")))
    # A prompt takes 15 of 16 tokens: no draft. What its last chunk leaves is for drafts.
    assert seen[0] == (16, 1)
    assert all(tokens <= 16 for tokens, _ in seen)
    assert any(count == 5 for _, count in seen)
    assert skipped(engine)["no_room"] >= 10


def test_drafts_take_no_block_that_a_request_needs(write_model: WriteModel, make_engine: MakeEngine) -> None:
    """Two requests fill the pool: drafts preempt nobody."""
    requests = [Request(str(index), [index + 2] * 30, greedy(18)) for index in range(2)]
    small = make_engine(write_model(), enable_prefix_caching=False)
    shrink_pool(small, 6)
    expected = generate(small, requests)
    engine = make_engine(
        write_model(),
        enable_prefix_caching=False,
        drafter=always_right({tuple(one.prompt_token_ids): expected[one.request_id] for one in requests}),
    )
    shrink_pool(engine, 6)
    assert generate(engine, requests) == expected
    assert engine.stats().num_preemptions_total == 0
    assert counts(engine).num_accepted_tokens > 0


def test_accepted_blocks_alone_are_cached(
    write_model: WriteModel, make_engine: MakeEngine, answer_of: Callable[[SamplingParams], Answer]
) -> None:
    """A second turn finds what the first has computed, drafts that fell excepted."""
    answer = answer_of(greedy(24))
    drafter = OftenRight({PROMPT: answer}, VOCABULARY, seed=2)
    engine = make_engine(write_model(), drafter=drafter)
    generate(engine, [Request("0", PROMPT, greedy(24))])
    second = [*PROMPT, *answer, 5, 6]
    expected = generate(make_engine(write_model()), [Request("1", second, greedy(8))])
    assert generate(engine, [Request("1", second, greedy(8))]) == expected
    assert engine.stats().prefix_cache_hit_tokens_total == (len(PROMPT) + 24 - 1) // 16 * 16


@pytest.mark.parametrize(
    "execution",
    [
        Execution(overlapped=True),
        Execution(EagerRecorder()),
        Execution(EagerRecorder(), overlapped=True),
    ],
    ids=["overlapped", "replayed", "replayed and overlapped"],
)
def test_checks_are_computed_eagerly_and_read_before_the_next_step(
    execution: Execution,
    write_model: WriteModel,
    make_engine: MakeEngine,
    answer_of: Callable[[SamplingParams], Answer],
) -> None:
    """As on a GPU, whose graphs are recorded for one token per request."""
    answer = answer_of(greedy(24))
    engine = make_engine(write_model(), execution=execution, drafter=always_right({PROMPT: answer}))
    assert generate(engine, [Request("0", PROMPT, greedy(24))])["0"] == answer
    assert counts(engine).num_accepted_tokens == counts(engine).num_draft_tokens > 0


def test_steps_overlap_again_where_the_drafter_has_failed(
    write_model: WriteModel, make_engine: MakeEngine, answer_of: Callable[[SamplingParams], Answer]
) -> None:
    """No draft will follow the last token, so no step waits for it."""
    engine = make_engine(write_model(), execution=Execution(overlapped=True), drafter=failing(ValueError()))
    assert generate(engine, [Request("0", PROMPT, greedy(24))])["0"] == answer_of(greedy(24))
    engine.add_request(Request("1", PROMPT, greedy(24)))
    engine.step()
    engine.step()
    assert engine._in_flight is not None
    assert not engine._must_read_first(engine._in_flight)


def test_many_requests_share_the_drafts_of_a_step(
    write_model: WriteModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of logits have room for no more, whatever is proposed."""
    for module in (drafting, step_plan):
        monkeypatch.setattr(module, "MOST_STEP_DRAFTS", 7)
    requests = [Request(str(index), [index + 1] * 3, greedy(9)) for index in range(3)]
    expected = generate(make_engine(write_model()), requests)
    engine = make_engine(
        write_model(),
        drafter=always_right({tuple(one.prompt_token_ids): expected[one.request_id] for one in requests}),
    )
    steps = run(engine, *requests)
    assert [len(outputs) for outputs in steps] == [3, 9, 9, 6], "two drafts each of seven"
    assert counts(engine).num_draft_tokens == 3 * (2 + 2 + 1)


def test_nan_in_a_draft_is_no_harm(write_model: WriteModel, make_engine: MakeEngine) -> None:
    """A damaged embedding: its keys and values are NaN, and a weight of 0 times NaN is NaN."""
    sick, requests = 7, [Request(str(index), [3 + index] * (5 + 9 * index), greedy(20)) for index in range(3)]
    healthy, engine = make_engine(write_model()), make_engine(write_model(), drafter=always(sick))
    for one in (healthy, engine):
        embedding_weight(one._runner._forward.model)[sick] = torch.nan
    expected = generate(healthy, requests)
    assert all(sick not in answer and len(answer) == 20 for answer in expected.values())
    assert generate(engine, requests) == expected
    assert skipped(engine)["not_finite"] > 0
    assert generate(engine, [replace(one, request_id=f"again-{one.request_id}") for one in requests]) == {
        f"again-{name}": answer for name, answer in expected.items()
    }


def test_a_check_without_memory_is_computed_without_drafts(write_model: WriteModel, make_engine: MakeEngine) -> None:
    requests = [Request(str(index), [index + 3] * (4 + 20 * index), greedy(30)) for index in range(3)]
    expected = generate(make_engine(write_model()), requests)
    drafter = OftenRight.about(requests, expected, VOCABULARY)
    engine = make_engine(write_model(), drafter=drafter)
    short = ShortOfMemory(engine, MemoryError)
    for request in requests:
        engine.add_request(request)
    answers: dict[str, list[int]] = {one.request_id: [] for one in requests}
    for step in range(200):
        checks = counts(engine).num_checks
        if step > 3 and short.num_failed == 0 and checks > 2:
            short.passes_left = 0
        for output in engine.step():
            assert output.token_id is not None, "no request is given up for drafts"
            answers[output.request_id].append(output.token_id)
        engine.check_integrity()
    assert short.num_failed == 1
    assert answers == expected
    assert skipped(engine)["out_of_memory"] > 0


def test_a_run_ends_where_longrope_turns_the_angles(tmp_path: Path, make_engine: MakeEngine) -> None:
    config = dense(
        "phi3",
        original_max_position_embeddings=20,
        rope_parameters=rope("longrope", partial_rotary_factor=0.5, **LONGROPE),
    )
    write_family(tmp_path, **config)
    for length in range(12, 24):
        prompt = tuple(2 + index % 50 for index in range(length))
        request = Request("0", prompt, greedy(16))
        expected = generate(make_engine(tmp_path, enable_prefix_caching=False), [request])["0"]
        engine = make_engine(tmp_path, drafter=always_right({prompt: expected}))
        for _ in range(2):
            assert generate(engine, [request])["0"] == expected
        assert counts(engine).num_accepted_tokens > 8
