"""The last layer computes the rows that are read, whatever else is in the step; answers stay as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from millstream_runtime.config import GovernorMode, SpeculationMethod
from millstream_runtime.distributed.leader import Leader
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.execution.graphs.buckets import Bucket
from millstream_runtime.engine.execution.step_input import ChunkInput, StepInput
from millstream_runtime.engine.request import Request, SamplingParams
from tests.support.drafters import OftenRight
from tests.support.eagle_heads import WriteHead
from tests.support.engines import MakeEngine, WriteModel, generate, greedy
from tests.support.family_cases import CASES, Models
from tests.support.medusa_heads import write_medusa_heads
from tests.support.tiny_families import VOCABULARY, prompts_of

pytestmark = pytest.mark.usefixtures("one_thread", "drafts_catch_up_by_fixed_chunks")

LENGTHS, NEW_TOKENS = (15, 47, 31), 4
CHUNKS = {"max_num_batched_tokens": 20, "enable_prefix_caching": False}
Tokens = dict[str, list[tuple[int, float]]]


@dataclass
class CountedMlp:
    """Counts the rows that it is given, by step."""

    mlp: Any
    rows: list[int] = field(default_factory=list)

    def __call__(self, x: Tensor) -> Tensor:
        self.rows.append(len(x))
        computed: Tensor = self.mlp(x)
        return computed

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        self.rows.append(len(x))
        self.mlp.add_to(residual, x)


def count_rows(engine: Engine) -> CountedMlp:
    """Of the last layer's MLP."""
    layers = engine._runner._forward.model.layers
    counted = CountedMlp(layers[-1].mlp)  # type: ignore[attr-defined]
    layers[-1] = replace(layers[-1], mlp=counted)  # type: ignore[type-var]
    return counted


def rows_by_step(engine: Engine, counted: CountedMlp) -> list[int]:
    """Run the engine to the end of its requests: rows that the last layer's MLP computes in each step."""
    found = []
    while engine.has_work():
        counted.rows.clear()
        engine.step()
        assert len(counted.rows) <= 1
        found.append(sum(counted.rows))
    engine.check_integrity()
    return found


def described(engine: Engine, prompts: list[list[int]]) -> Tokens:
    """Each answer's tokens with their log-probabilities."""
    sampling = SamplingParams(NEW_TOKENS, temperature=0.0, ignore_eos=True, logprobs=0)
    for index, prompt in enumerate(prompts):
        engine.add_request(Request(str(index), prompt, sampling))
    answers: Tokens = {str(index): [] for index in range(len(prompts))}
    while engine.has_work():
        for output in engine.step():
            assert output.token_id is not None
            assert output.logprobs is not None
            answers[output.request_id].append((output.token_id, output.logprobs.logprob))
    engine.check_integrity()
    return answers


def assert_alike(found: Tokens, expected: Tokens) -> None:
    for name, answer in expected.items():
        assert [token for token, _ in found[name]] == [token for token, _ in answer]
        assert [logprob for _, logprob in found[name]] == pytest.approx([one for _, one in answer], abs=2e-4)


def reading_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepInput, "reads_all_rows", True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module")
def pair() -> Iterator[Leader]:
    leader = Leader(2, torch.device("cpu"))
    yield leader
    leader.close()


@pytest.mark.matrix
@pytest.mark.parametrize("family", CASES)
def test_tokens_and_logprobs_of_every_family_are_those_of_all_rows(
    family: str, models: Models, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(LENGTHS)
    engine = make_engine(models.folder(family), **CHUNKS)
    counted = count_rows(engine)
    found = described(engine, prompts)
    assert max(counted.rows) < 8, "no step computed the rows of a prompt"
    reading_all_rows(monkeypatch)
    engine = make_engine(models.folder(family), **CHUNKS)
    counted = count_rows(engine)
    assert_alike(found, described(engine, prompts))
    assert max(counted.rows) == 20


@pytest.mark.deep
@pytest.mark.matrix
@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral", "deepseek-v3"])
def test_two_ranks_leave_out_the_same_rows(
    family: str, models: Models, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, pair: Leader
) -> None:
    engine = make_engine(models.folder(family), rank_group=pair, tensor_parallel_size=2, **CHUNKS)
    counted = count_rows(engine)
    found = described(engine, prompts_of(LENGTHS))
    assert max(counted.rows) < 8
    reading_all_rows(monkeypatch)
    assert_alike(found, described(make_engine(models.folder(family), **CHUNKS), prompts_of(LENGTHS)))


def test_a_chunk_that_is_not_the_last_of_its_prompt_stores_keys_and_values_alone(
    write_model: WriteModel, make_engine: MakeEngine
) -> None:
    engine = make_engine(write_model(), **CHUNKS)
    counted = count_rows(engine)
    engine.add_request(Request("long", [*range(3, 58)], greedy(3)))
    assert rows_by_step(engine, counted) == [0, 0, 1, 1, 1]


def test_decodes_next_to_a_prompt_are_read_and_so_is_its_last_token(
    write_model: WriteModel, make_engine: MakeEngine
) -> None:
    engine = make_engine(write_model(), **CHUNKS)
    counted = count_rows(engine)
    for name in "ab":
        engine.add_request(Request(name, [5, 6, 7], greedy(8)))
    engine.step()
    engine.add_request(Request("long", [*range(3, 33)], greedy(1)))
    assert rows_by_step(engine, counted)[:3] == [2, 3, 2]


def test_drafts_are_read_with_the_token_before_them(
    models: Models, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = models.folder(next(iter(CASES)))
    prompt, other = prompts_of((15, 40))
    (answer,) = generate(make_engine(folder), [Request("0", prompt, greedy(12))]).values()

    def run() -> tuple[Tokens, int]:
        drafter = OftenRight({tuple(prompt): answer}, VOCABULARY)
        engine = make_engine(folder, drafter=drafter, max_num_batched_tokens=30)
        engine._pace = None
        counted = count_rows(engine)
        found = described(engine, [prompt, other])
        stats = engine.stats().speculation
        assert stats is not None
        assert stats.num_accepted_tokens > 0
        return found, max(counted.rows)

    found, most = run()
    reading_all_rows(monkeypatch)
    expected, most_of_all = run()
    assert_alike(found, expected)
    assert most < most_of_all


def test_prompt_logprobs_read_the_rows_of_their_own_prompt_alone(
    write_model: WriteModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> tuple[list[float], list[int]]:
        engine = make_engine(write_model(), max_num_batched_tokens=64, enable_prefix_caching=False)
        engine._pace = None
        counted, outputs = count_rows(engine), []
        engine.add_request(Request("plain", [*range(3, 28)], greedy(1)))
        engine.add_request(Request("asks", [*range(3, 23)], greedy(1, prompt_logprobs=1)))
        while engine.has_work():
            outputs += engine.step()
        (prefill,) = (one.prefill for one in outputs if one.request_id == "asks")
        assert prefill is not None
        assert prefill.prompt_logprobs is not None
        return [one.logprob for one in prefill.prompt_logprobs if one is not None], counted.rows

    found, rows = run()
    assert rows == [21]
    reading_all_rows(monkeypatch)
    expected, rows = run()
    assert rows == [45]
    assert len(found) == 19
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("method", [SpeculationMethod.EAGLE, SpeculationMethod.MEDUSA])
def test_heads_that_draft_have_the_states_of_all_rows(
    method: SpeculationMethod, tmp_path: Path, write_model: WriteModel, write_head: WriteHead, make_engine: MakeEngine
) -> None:
    folder = write_model()
    head = write_head(folder) if method is SpeculationMethod.EAGLE else write_medusa_heads(tmp_path)
    speculation = {"speculation_method": method, "draft_model": str(head)}
    engine = make_engine(folder, **speculation, speculation_governor=GovernorMode.DISABLED, **CHUNKS)
    counted = count_rows(engine)
    engine.add_request(Request("long", [*range(3, 50)], greedy(1)))
    assert rows_by_step(engine, counted) == [20, 20, 7]


def test_a_draft_model_computes_the_rows_of_its_drafts(write_model: WriteModel, make_engine: MakeEngine) -> None:
    folder = write_model()
    speculation = {"speculation_method": SpeculationMethod.DRAFT_MODEL, "draft_model": str(folder)}
    engine = make_engine(folder, **speculation, speculation_governor=GovernorMode.DISABLED)
    assert engine._drafting is not None
    layers = engine._drafting._drafter._forward.model.layers  # type: ignore[attr-defined]
    counted = CountedMlp(layers[-1].mlp)
    layers[-1] = replace(layers[-1], mlp=counted)
    generate(engine, [Request("0", [*range(3, 50)], greedy(8))])
    stats = engine.stats().speculation
    assert stats is not None
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0, "the draft model is the target"
    assert 0 < max(counted.rows) < 8


def test_a_graph_computes_all_rows() -> None:
    step = StepInput([9], [ChunkInput(1, 9, 0, 0, 1, num_read_rows=0)], [])
    assert step.last_layer_rows == []
    assert msgspec.structs.replace(step, bucket=Bucket(1, 1)).last_layer_rows is None


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        ([None, None], None),
        ([1, 0], [0]),
        ([0, 1], [12]),
        ([0, 0], []),
        ([1, 1], [0, 12]),
        ([1, 3], [0, 10, 11, 12]),
        ([1, 11], [0, *range(2, 13)]),  # one is left out, as with more around it: the last row attends as a decode
        ([1, 12], None),
        ([None, 1], [0, 12]),
    ],
)
def test_rows_of_a_step(read: list[int | None], expected: list[int] | None) -> None:
    chunks = [
        ChunkInput(count, count, 0, 0, 1, num_read_rows=number) for count, number in zip((1, 12), read, strict=True)
    ]
    wanted = [0, 11, 12] if expected is None else expected
    calls = [wanted[:1], wanted[1:]]
    step = StepInput([7] * 13, chunks, calls)
    assert step.last_layer_rows == expected
    assert step.reads_all_rows is (expected is None)
    places: Callable[[int], int] = (lambda row: row) if expected is None else expected.index
    assert step.head_rows == [[places(row) for row in call] for call in calls]
