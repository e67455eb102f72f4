"""What a user of the engine meets: limits, stops, seeds, aborts, and refusals in one sentence."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.execution.execution_mode import Execution
from millstream_runtime.engine.request import FinishReason, Request, SamplingParams
from millstream_runtime.errors import FailureReason, RuntimeFailure
from tests.support.engines import MakeEngine, WriteModel, generate, greedy, requests_for

PROMPT = [5, 17, 80, 3]


@pytest.fixture
def engine(write_model: WriteModel, make_engine: MakeEngine) -> Engine:
    return make_engine(write_model())


def outputs_of(engine: Engine, sampling: SamplingParams, prompt: list[int] | None = None) -> list[Any]:
    engine.add_request(Request("one", prompt or PROMPT, sampling))
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    return outputs


def test_phases_come_in_order(write_model: WriteModel) -> None:
    from millstream_runtime.config import RuntimeConfig

    phases: list[str] = []
    config = RuntimeConfig(model=str(write_model()), served_model_name="test", kv_cache_memory_bytes=1 << 20)
    engine = Engine(config, lambda phase, message: phases.append(phase))
    engine.warm_up()
    assert phases == ["LoadingWeights", "SizingKVCache", "WarmingUp"]
    assert engine.stats().kv_blocks_used == 0
    assert not engine.has_work()


def test_length_ends_at_max_tokens_and_at_the_context(engine: Engine) -> None:
    outputs = outputs_of(engine, greedy(6))
    assert len(outputs) == 6
    assert [output.finish_reason for output in outputs] == [None] * 5 + [FinishReason.LENGTH]
    long_prompt = [7] * 250
    outputs = outputs_of(engine, greedy(100), long_prompt)
    assert len(outputs) == 256 - 250
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_stop_ids_and_eos_end_with_stop_and_are_reported(engine: Engine) -> None:
    tokens = [output.token_id for output in outputs_of(engine, greedy(20))]
    stop = tokens[4]
    first = tokens.index(stop)
    outputs = outputs_of(engine, greedy(20, stop_token_ids=frozenset({stop})))
    assert [output.token_id for output in outputs] == tokens[: first + 1]
    assert outputs[-1].finish_reason is FinishReason.STOP


def test_eos_from_generation_config_ends_unless_ignored_and_not_before_min_tokens(
    tmp_path: Any, write_model: WriteModel, make_engine: MakeEngine
) -> None:
    import shutil

    engine_of_config_alone = make_engine(write_model())
    tokens = [output.token_id for output in outputs_of(engine_of_config_alone, greedy(20))]
    folder = shutil.copytree(write_model(), tmp_path / "model")
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": [198, {tokens[2]}]}}')
    engine = make_engine(folder)
    assert engine.model_config.eos_token_ids == {198, tokens[2], *engine_of_config_alone.model_config.eos_token_ids}
    outputs = outputs_of(engine, greedy(20, ignore_eos=False))
    assert [output.token_id for output in outputs] == tokens[: tokens.index(tokens[2]) + 1]
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert len(outputs_of(engine, greedy(20))) == 20
    later = outputs_of(engine, greedy(20, ignore_eos=False, min_tokens=8))
    assert len(later) > 8
    assert tokens[2] not in [output.token_id for output in later[:8]]


def test_a_seed_gives_the_same_tokens_alone_and_in_any_batch(write_model: WriteModel, make_engine: MakeEngine) -> None:
    def seeded(seed: int | None, **overrides: Any) -> SamplingParams:
        return SamplingParams(max_tokens=24, temperature=0.9, seed=seed, ignore_eos=True, **overrides)

    engine = make_engine(write_model())
    variants: list[dict[str, Any]] = [{}, {"top_k": 20}, {"top_p": 0.7}, {"top_k": 30, "top_p": 0.9}]
    alone = [generate(engine, [Request("x", PROMPT, seeded(11, **one))])["x"] for one in variants]
    crowd = [Request(f"noise-{i}", [9, i + 1], seeded(None)) for i in range(3)]
    mixed = [Request(str(i), PROMPT, seeded(11, **one)) for i, one in enumerate(variants)]
    chunked = make_engine(write_model(), max_num_batched_tokens=16)
    for other in (engine, chunked):
        answers = generate(other, [*crowd, *mixed])
        assert [answers[str(i)] for i in range(4)] == alone
    assert generate(engine, [Request("x", PROMPT, seeded(12))])["x"] != alone[0]
    free = [generate(engine, [Request("x", PROMPT, seeded(None))])["x"] for _ in range(2)]
    assert free[0] != free[1]


def test_logprobs_are_those_of_transformers(write_model: WriteModel, make_engine: MakeEngine) -> None:
    """Of every token of prompt and answer, in chunks and although sampling is penalised and biased."""
    import torch
    from transformers import LlamaForCausalLM

    prompt = [5, 17, 80, 3, *range(30, 60)]
    sampling = SamplingParams(
        6, temperature=1.2, seed=3, presence_penalty=1.0, logit_bias=((7, 5.0),), logprobs=3, prompt_logprobs=2
    )
    for config in ({}, {"max_num_batched_tokens": 16}):
        engine = make_engine(write_model(), **config)
        for _ in range(2):  # the second time it is not the prefix cache that answers
            outputs = outputs_of(engine, sampling, prompt)
            ids = [*prompt, *(output.token_id for output in outputs)]
            model = LlamaForCausalLM.from_pretrained(write_model(), dtype=torch.float32)
            with torch.inference_mode():
                exact = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            prefill = outputs[0].prefill
            assert prefill is not None
            assert prefill.prompt_logprobs is not None
            entries = [*prefill.prompt_logprobs, *(output.logprobs for output in outputs)]
            assert len(entries) == len(ids)
            assert entries[0] is None
            for position, entry in enumerate(entries[1:], start=1):
                row = exact[position - 1]
                best = row.topk(2 if position < len(prompt) else 3)
                assert entry.token_id == ids[position]
                assert entry.logprob == pytest.approx(float(row[ids[position]]), abs=1e-4)
                assert entry.rank == int((row > row[ids[position]]).sum()) + 1
                assert [token_id for token_id, _ in entry.top] == best.indices.tolist()
                assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_a_processor_guides_each_token_of_its_own_request(engine: Engine) -> None:
    class Counting:
        """Allows token n only, as the n-th."""

        def __call__(self, logits: Any, generated_ids: Any) -> None:
            allowed = logits[len(generated_ids)].clone()
            logits.fill_(float("-inf"))
            logits[len(generated_ids)] = allowed

    free = generate(engine, [Request("free", PROMPT, greedy(8))])["free"]
    engine.processors_for = lambda request: (Counting(),) if request.request_id == "guided" else ()
    answers = generate(engine, [Request(name, PROMPT, greedy(8)) for name in ("guided", "free")])
    assert answers == {"guided": list(range(8)), "free": free}


def test_random_aborts_leak_nothing(engine: Engine) -> None:
    rng = random.Random(5)
    names: list[str] = []
    for step in range(150):
        if rng.random() < 0.4:
            names.append(f"r{step}")
            prompt = [rng.randrange(199) for _ in range(rng.randint(1, 60))]
            engine.add_request(Request(names[-1], prompt, greedy(rng.randint(1, 40))))
        if names and rng.random() < 0.3:
            engine.abort(rng.choice(names))  # running, waiting, finished or aborted before: all the same
        seen = {output.request_id for output in engine.step()}
        assert seen <= set(names)
        engine.check_integrity()
    for name in names:
        engine.abort(name)
    engine.check_integrity()
    assert not engine.has_work()
    assert engine.stats().kv_blocks_used == 0
    assert engine.step() == []


@pytest.mark.parametrize("named", [{"stop_token_ids": frozenset({199})}, {"logit_bias": ((-1, 1.0),)}])
def test_ids_that_the_model_lacks_are_refused(engine: Engine, named: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="outside the vocabulary"):
        engine.add_request(Request("bad", PROMPT, greedy(3, min_tokens=2, **named)))


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "says"),
    [
        ([], 1, "0 tokens"),
        ([1] * 256, 1, "must have 1 to 255"),
        ([199], 1, "outside the vocabulary"),
        ([-1], 1, "outside the vocabulary"),
        ([1], 0, "max_tokens"),
    ],
)
def test_impossible_requests_are_refused_and_leave_nothing(
    engine: Engine, prompt: list[int], max_tokens: int, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        engine.add_request(Request("bad", prompt, greedy(max_tokens)))
    assert not engine.has_work()
    engine.check_integrity()


def test_an_id_in_use_is_refused(engine: Engine) -> None:
    engine.add_request(Request("same", PROMPT, greedy(3)))
    with pytest.raises(ValueError, match="already running"):
        engine.add_request(Request("same", PROMPT, greedy(3)))


def test_more_requests_than_rows_wait_their_turn(engine: Engine) -> None:
    prompts = [[index + 1, 2, 3] for index in range(20)]
    for request in requests_for(prompts, greedy(4)):
        engine.add_request(request)
    engine.step()
    assert (engine.stats().num_requests_running, engine.stats().num_requests_waiting) == (8, 12)
    finished = []
    while engine.has_work():
        finished += [output.request_id for output in engine.step() if output.finish_reason]
    assert finished == [str(index) for index in range(20)]


def test_a_pool_too_small_for_what_was_asked_is_refused_with_the_budget(
    write_model: WriteModel, make_engine: MakeEngine
) -> None:
    folder = write_model(max_position_embeddings=32768)
    with pytest.raises(RuntimeFailure, match=r"32768 tokens needs .*lower --max-model-len") as caught:
        make_engine(folder, max_model_len=32768)
    assert caught.value.reason is FailureReason.OUT_OF_MEMORY
    engine = make_engine(folder)  # nobody asked for a length: it shrinks to what fits
    assert engine.model_config.max_model_len == (1 << 20) // (2 * 2 * 2 * 12 * 4 * 16) * 16


def test_a_length_beyond_the_model_is_refused(write_model: WriteModel, make_engine: MakeEngine) -> None:
    with pytest.raises(RuntimeFailure, match="at most 256") as caught:
        make_engine(write_model(), max_model_len=257)
    assert caught.value.reason is FailureReason.INVALID_CONFIG


def test_a_request_whose_numbers_go_wrong_ends_alone(engine: Engine) -> None:
    """NaN in one sequence (here: poisoned cache) must not reach another, nor the next owner of its blocks."""
    expected = generate(engine, requests_for([[4, 5, 6]], greedy(12)))["0"]
    engine.add_request(Request("sick", PROMPT, greedy(12)))
    engine.add_request(Request("well", [4, 5, 6], greedy(12)))
    answers = [output for output in engine.step() if output.request_id == "well"]
    block = next(one.block_table[0] for one in engine._scheduler.running if one.request.request_id == "sick")
    for layer in engine._runner._forward._cache.layers:
        layer[block] = float("nan")
    ended: list[Any] = []
    while engine.has_work():
        for output in engine.step():
            (answers if output.request_id == "well" else ended).append(output)
    assert [(one.token_id, one.finish_reason) for one in ended] == [(None, FinishReason.ERROR)]
    assert [one.token_id for one in answers] == expected
    assert generate(engine, requests_for([[4, 5, 6], PROMPT], greedy(12)))["0"] == expected


@pytest.mark.parametrize("overlapped", [False, True])
def test_penalties_are_those_of_the_models_own_logits(
    overlapped: bool, write_model: WriteModel, make_engine: MakeEngine
) -> None:
    """By their formulas over transformers' logits; the row has had another penalised request before."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(write_model(), dtype=torch.float32)
    prompt = [5, 17, 80, 3, 17, 40]
    execution = Execution(overlapped=True) if overlapped else None
    engine = make_engine(write_model(), execution=execution, max_num_seqs=1)
    for sampling in (
        greedy(20, frequency_penalty=0.3, presence_penalty=-0.2),
        greedy(20, repetition_penalty=1.4, frequency_penalty=0.1),
    ):
        ids = list(prompt)
        for _ in range(20):
            with torch.no_grad():
                scores = model(torch.tensor([ids])).logits[0, -1]
            for token_id in set(ids):
                if sampling.repetition_penalty != 1.0:
                    up = scores[token_id] > 0
                    scores[token_id] *= 1 / sampling.repetition_penalty if up else sampling.repetition_penalty
                if count := ids[len(prompt) :].count(token_id):
                    scores[token_id] -= sampling.frequency_penalty * count + sampling.presence_penalty
            ids.append(int(scores.argmax()))
        assert [output.token_id for output in outputs_of(engine, sampling, prompt)] == ids[len(prompt) :]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"logit_bias": tuple((token_id, -math.inf) for token_id in range(199))}, "logit_bias"),
        ({"stop_token_ids": frozenset(range(199)), "min_tokens": 2}, "min_tokens"),
        (
            {
                "logit_bias": tuple((token_id, -math.inf) for token_id in range(100)),
                "stop_token_ids": frozenset(range(100, 199)),
                "min_tokens": 1,
            },
            "min_tokens",
        ),
        ({"logit_bias": ((3, math.nan),)}, "logit_bias of token 3 is nan"),
        ({"logit_bias": ((3, math.inf),)}, "logit_bias of token 3 is inf"),
    ],
)
def test_a_request_that_leaves_no_token_is_refused(
    asked: dict[str, Any], message: str, write_model: WriteModel, make_engine: MakeEngine
) -> None:
    engine = make_engine(write_model())
    with pytest.raises(ValueError, match=message):
        engine.add_request(Request("x", [5, 6], greedy(4, **asked)))
    assert not engine.has_work()


def test_the_last_token_that_is_allowed_comes_up(write_model: WriteModel, make_engine: MakeEngine) -> None:
    banned = tuple((token_id, -math.inf) for token_id in range(199) if token_id != 42)
    for sampling in (greedy(3, logit_bias=banned), SamplingParams(3, top_p=0.5, logit_bias=banned, ignore_eos=True)):
        assert [output.token_id for output in outputs_of(make_engine(write_model()), sampling)] == [42] * 3
