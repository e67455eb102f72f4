"""The governor in the engine: it is fed by what steps take and drafts give, and its modes change at any time."""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as Seq

import pytest

from millstream_runtime.config import GovernorMode
from millstream_runtime.engine import warm_up
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.request import GovernorReport, Request
from millstream_runtime.engine.scheduling.sequence import Sequence
from millstream_runtime.engine.speculation import reading_worth
from millstream_runtime.engine.speculation.drafter import Drafter
from millstream_runtime.engine.speculation.governor import Governor
from millstream_runtime.engine.speculation.length_choice import crowd_of
from tests.support.drafters import EachAlone, always, always_right
from tests.support.drafting_engines import counts
from tests.support.engines import MakeEngine, WriteModel, generate, greedy

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.deep]
PROMPT = tuple(random.Random(1).randrange(199) for _ in range(21))
NEW_TOKENS = 60
REQUEST = Request("0", PROMPT, greedy(NEW_TOKENS))


class StepClock:
    """A step takes a second, and `seconds_per_draft` more for each draft that it checks."""

    def __init__(self, engine: Engine, seconds_per_draft: float) -> None:
        self._engine, self._seconds_per_draft = engine, seconds_per_draft
        self._seconds, self._num_steps = 0.0, 0
        engine.step_clock = self

    def __call__(self) -> float:
        if self._engine._steps_total > self._num_steps:  # the step was launched since it was asked last
            self._num_steps += 1
            self._seconds += 1.0 + self._seconds_per_draft * self._drafts_of_step()
        return self._seconds

    def skip(self, seconds: float) -> None:
        self._seconds += seconds

    def _drafts_of_step(self) -> int:
        return sum(len(one.draft_ids) for one in self._engine._scheduler.running)


def free(drafter: EachAlone) -> EachAlone:
    """The same, whose proposals cost nothing."""
    drafter.is_free = True  # type: ignore[attr-defined]
    return drafter


def report(engine: Engine) -> GovernorReport:
    found = counts(engine).governor
    assert found is not None
    return found


@pytest.fixture
def answer(write_model: WriteModel, make_engine: MakeEngine) -> list[int]:
    return generate(make_engine(write_model()), [REQUEST])["0"]


@pytest.mark.parametrize("is_free", [True, False], ids=["n-grams", "a draft model"])
def test_what_gains_is_checked_once_it_is_known_what_steps_take(
    is_free: bool, answer: list[int], write_model: WriteModel, make_engine: MakeEngine
) -> None:
    drafter = always_right({PROMPT: answer})
    engine = make_engine(
        write_model(), drafter=free(drafter) if is_free else drafter, speculation_governor=GovernorMode.ENFORCE
    )
    StepClock(engine, 0.05)
    for _ in range(2):
        assert generate(engine, [REQUEST])["0"] == answer
    found, governor = counts(engine), report(engine)
    assert found.num_accepted_tokens == found.num_draft_tokens > NEW_TOKENS / 2
    assert found.skipped["no_gain"] >= 4, "the first steps are timed without drafts"
    assert governor.mode == "Enforce"
    assert governor.length == governor.chosen_length > 1
    tokens, seconds = governor.tokens_by_length, governor.seconds_by_length
    assert tokens[4] / seconds[4] > 2 * tokens[0] / seconds[0], "the goodput of each length"
    assert sum(tokens) == 2 * (NEW_TOKENS - 1), "all but those of the prompts' steps"
    assert engine._drafting is not None
    assert not engine._drafting.lengths._compared
    assert not engine._drafting._had_drafts
    assert not engine._drafting.lengths.governor._acceptance._requests  # type: ignore[attr-defined]


def test_what_checks_take_is_known_from_the_warm_up(
    answer: list[int], write_model: WriteModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_up, "MOST_DRAFTS_SECONDS", 1e9)  # however long a busy machine takes
    drafter = free(always_right({PROMPT: answer}))
    engine = make_engine(write_model(), drafter=drafter, speculation_governor=GovernorMode.ENFORCE)
    StepClock(engine, 0.05)
    engine.warm_up()
    assert engine._drafting is not None
    governor = engine._drafting.lengths.governor
    assert isinstance(governor, Governor)
    assert governor._bucket(1).costs.line() == pytest.approx([1.0, 1.05, 1.1, 1.15, 1.2])
    assert governor._bucket(4).costs.line() == pytest.approx([1.0, 1.2, 1.4, 1.6, 1.8])
    assert (counts(engine).num_checks, governor.stats().decode_seconds) == (0, 0.0)
    assert generate(engine, [REQUEST])["0"] == answer
    assert counts(engine).skipped["no_gain"] == 0


def test_what_costs_more_than_it_saves_is_left_alone(
    answer: list[int], write_model: WriteModel, make_engine: MakeEngine
) -> None:
    drafter = free(always_right({PROMPT: answer}))
    engine = make_engine(write_model(), drafter=drafter, speculation_governor=GovernorMode.ENFORCE)
    StepClock(engine, 1.5)
    for _ in range(4):
        assert generate(engine, [REQUEST])["0"] == answer
    assert counts(engine).num_checks <= 4, "trials"
    assert counts(engine).skipped["no_gain"] > 3 * NEW_TOKENS
    governor = report(engine)
    assert governor.exploration_seconds <= 0.01 * sum(governor.seconds_by_length)


def test_one_that_is_hard_to_guess_is_left_alone_in_a_batch_of_others(
    answer: list[int], write_model: WriteModel, make_engine: MakeEngine
) -> None:
    """Its drafts are compared with what comes, or it would be tried for ever."""
    hard = Request("hard", [3] * 9, greedy(NEW_TOKENS))
    expected = generate(make_engine(write_model()), [hard])["hard"]
    wrong = {tuple(hard.prompt_token_ids): [(one + 1) % 199 for one in expected]}
    drafter = free(always_right({PROMPT: answer} | wrong))
    engine = make_engine(write_model(), drafter=drafter, speculation_governor=GovernorMode.ENFORCE)
    StepClock(engine, 0.2)
    for _ in range(8):  # the first trial of two at once waits for its budget
        assert generate(engine, [REQUEST, hard]) == {"0": answer, "hard": expected}
    found = counts(engine)
    assert found.num_accepted_tokens > 0.7 * found.num_draft_tokens > 20


def test_observing_checks_everything_and_says_what_it_would_choose(
    answer: list[int], write_model: WriteModel, make_engine: MakeEngine
) -> None:
    drafter = free(always_right({PROMPT: answer[:30] + [0] * 30}))
    engine = make_engine(write_model(), drafter=drafter, speculation_governor=GovernorMode.OBSERVE)
    StepClock(engine, 1.5)
    assert generate(engine, [REQUEST])["0"] == answer
    assert counts(engine).skipped["no_gain"] == 0
    governor = report(engine)
    assert (governor.mode, governor.chosen_length, governor.exploration_seconds) == ("Observe", 0.0, 0.0)
    assert governor.tokens_by_length[4] > 0
    engine.set_speculation_governor(GovernorMode.DISABLED)
    checks = counts(engine).num_checks
    assert generate(engine, [REQUEST])["0"] == answer
    assert counts(engine).num_checks > checks
    assert counts(engine).governor is None


def test_the_time_in_which_prompts_are_read_is_no_cost_of_drafts(
    answer: list[int], write_model: WriteModel, make_engine: MakeEngine
) -> None:
    class Reading(EachAlone):
        """A draft model that takes a minute per step to read a prompt."""

        has_read_prompts = False

        def propose(self, wanted: Mapping[Sequence, int]) -> Mapping[Sequence, Seq[int]]:
            self.has_read_prompts = any(one.num_generated_tokens < 20 for one in wanted)
            if not self.has_read_prompts:
                return super().propose(wanted)
            clock.skip(60)
            return {}

    drafter = Reading(lambda sequence, most: answer[sequence.num_generated_tokens :][:most])
    engine = make_engine(write_model(), drafter=drafter, speculation_governor=GovernorMode.OBSERVE)
    clock = StepClock(engine, 0.05)
    assert generate(engine, [REQUEST])["0"] == answer
    governor, num_steps = report(engine), engine.stats().steps_total
    assert counts(engine).skipped["no_proposal"] == 19
    assert sum(governor.seconds_by_length) == pytest.approx(1.2 * (num_steps - 1 - 19))
    assert engine._drafting is not None
    assert engine._drafting.lengths.governor.stats().decode_seconds > 19 * 60  # type: ignore[union-attr]


def test_a_prompt_that_takes_longer_to_read_than_its_drafts_save_is_left_alone(
    answer: list[int], write_model: WriteModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_up, "MOST_DRAFTS_SECONDS", 1e9)  # however long a busy machine takes
    monkeypatch.setattr(reading_worth, "CHUNK_SECONDS", 20.0)  # as long as 20 steps, as in life

    class Reading(EachAlone):
        """A draft model that takes so many seconds to read a prompt."""

        seconds = 0.0

        def reading_seconds(self, sequence: Sequence) -> float:
            return self.seconds

    drafter = Reading(lambda sequence, most: answer[sequence.num_generated_tokens :][:most])
    engine = make_engine(write_model(), drafter=drafter, speculation_governor=GovernorMode.ENFORCE)
    StepClock(engine, 0.05)
    engine.warm_up()
    left_alone = []
    for seconds in (0.0, 40.0, 52.0, 0.0):
        drafter.seconds, before = seconds, counts(engine).skipped["no_gain"]
        assert generate(engine, [REQUEST])["0"] == answer
        left_alone.append(counts(engine).skipped["no_gain"] - before)
    # 60 tokens take 60 seconds without drafts, and 14 with: drafts save 46.
    assert max(left_alone[0], left_alone[1], left_alone[3]) <= 4, "trials"
    assert left_alone[2] > 20, "until a trial has read it"


@pytest.mark.parametrize("failure", [ValueError("the prompt: secret"), None], ids=["an error", "no number"])
def test_a_drafter_that_cannot_say_how_long_it_reads_ends_drafting_and_no_request(
    failure: Exception | None,
    answer: list[int],
    write_model: WriteModel,
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warm_up, "MOST_DRAFTS_SECONDS", 1e9)  # however long a busy machine takes

    class Failing(EachAlone):
        is_broken = False

        def reading_seconds(self, sequence: Sequence) -> float | None:
            if self.is_broken and failure is not None:
                raise failure
            return None if self.is_broken else 0.0

    drafter = Failing(lambda sequence, most: answer[sequence.num_generated_tokens :][:most])
    engine = make_engine(write_model(), drafter=drafter, speculation_governor=GovernorMode.ENFORCE)
    StepClock(engine, 0.05)
    engine.warm_up()
    drafter.is_broken = True
    assert generate(engine, [REQUEST])["0"] == answer
    first = counts(engine).skipped
    assert first["drafter_failed"] > 0
    assert generate(engine, [REQUEST])["0"] == answer
    assert counts(engine).skipped["drafter_failed"] >= first["drafter_failed"] + NEW_TOKENS - 2, "not asked again"


@pytest.mark.parametrize("drafter", [free(always(3)), always(3)], ids=["n-grams", "a draft model"])
def test_nothing_drafts_while_requests_will_soon_be_refused(
    drafter: Drafter, write_model: WriteModel, make_engine: MakeEngine
) -> None:
    engine = make_engine(write_model(), drafter=drafter, max_num_seqs=1, speculation_governor=GovernorMode.ENFORCE)
    engine._crowd = 1
    generate(engine, [Request(str(index), [index + 2] * 4, greedy(9)) for index in range(3)])
    skipped = counts(engine).skipped
    assert skipped["crowded"] == 2 * 7, "while a third and a second wait; at the last token nothing drafts anyway"
    engine.set_speculation_governor(GovernorMode.DISABLED)
    generate(engine, [Request(str(index), [index + 2] * 4, greedy(9)) for index in range(2)])
    assert counts(engine).skipped["crowded"] == skipped["crowded"]
    assert crowd_of(8) == 32
    assert crowd_of(64) == 128
