"""Trials of a draft model lose at most 1 % of the seconds of decoding, reading prompts for them included.

Numerator and denominator are those that `/metrics` exports: `millstream_spec_decode_exploration_seconds_total` over all
of `millstream_spec_decode_seconds_total`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as Seq

import pytest

from benchmarks.governor import MOST_RECORDED
from benchmarks.governor_simulator import Phase, even, simulate
from benchmarks.governor_simulator import warm_up as warm_up_governor
from benchmarks.recorded_steps import RecordedSteps, read
from millstream_runtime.config import GovernorMode, SpeculationMethod
from millstream_runtime.engine import warm_up
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.request import GovernorReport, Request
from millstream_runtime.engine.scheduling.sequence import Sequence
from millstream_runtime.engine.speculation.draft_model import DraftModelDrafter
from millstream_runtime.engine.speculation.governor import Governor
from tests.support.drafting_engines import counts
from tests.support.engines import EvenClock, MakeEngine, WriteModel, generate, greedy

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.deep]
MOST_SHARE = 0.01
VOCABULARY, NEW_TOKENS = 199, 60
STEP_LOOKS = 2  # at the clock in a step and its drafting: milliseconds


def report(engine: Engine) -> GovernorReport:
    found = counts(engine).governor
    assert found is not None
    return found


def prompts(count: int) -> list[tuple[int, ...]]:
    rng = random.Random(5)
    return [tuple(rng.randrange(2, VOCABULARY) for _ in range(rng.randint(20, 150))) for _ in range(count)]


@pytest.fixture(autouse=True)
def _whole_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "MOST_DRAFTS_SECONDS", 1e9)  # however long a busy machine takes


def test_a_draft_model_whose_drafts_fall(write_model: WriteModel, make_engine: MakeEngine) -> None:
    """Engine and drafter look at one clock, so reading a prompt takes as long as a step and a half."""
    engine = make_engine(
        write_model(),
        speculation_method=SpeculationMethod.DRAFT_MODEL,
        draft_model=str(write_model(num_hidden_layers=1)),
        speculation_governor=GovernorMode.ENFORCE,
        enable_prefix_caching=False,
    )
    assert engine._drafting is not None
    drafter, clock = engine._drafting._drafter, EvenClock()
    assert isinstance(drafter, DraftModelDrafter)
    engine.step_clock = drafter._clock = clock
    engine.warm_up()
    for number, prompt in enumerate(prompts(30)):
        generate(engine, [Request(str(number), prompt, greedy(NEW_TOKENS))])
        found = report(engine)
        assert found.exploration_seconds <= MOST_SHARE * sum(found.seconds_by_length)
    assert report(engine).exploration_seconds > 0
    assert report(engine).reading_seconds > 0


class SlowReader:
    """Takes as long as five steps to read a prompt, and guesses wrong."""

    READING_LOOKS = 5 * STEP_LOOKS

    def __init__(self) -> None:
        self.has_read_prompts, self.num_read = False, 0
        self._read: set[Sequence] = set()
        self.clock = EvenClock()

    def propose(self, wanted: Mapping[Sequence, int]) -> Mapping[Sequence, Seq[int]]:
        unread = {one for one in wanted if one not in self._read and not one.request.is_heartbeat}
        self._read |= unread
        self.has_read_prompts = bool(unread)
        self.num_read += len(unread)
        self.clock._num_looks += self.READING_LOOKS * len(unread) + STEP_LOOKS  # drafts double a step
        return {one: [(one.token_ids[-1] + 7) % VOCABULARY] * most for one, most in wanted.items()}

    def reading_seconds(self, sequence: Sequence) -> float:
        return 0.0 if sequence in self._read else self.READING_LOOKS / 1000

    def forget(self, sequence: Sequence) -> None:
        self._read.discard(sequence)


def test_a_drafter_that_takes_five_steps_to_read_a_prompt(write_model: WriteModel, make_engine: MakeEngine) -> None:
    drafter = SlowReader()
    engine = make_engine(write_model(), drafter=drafter, speculation_governor=GovernorMode.ENFORCE)
    engine.step_clock = drafter.clock
    engine.warm_up()
    for number, prompt in enumerate(prompts(40)):
        generate(engine, [Request(str(number), prompt, greedy(NEW_TOKENS))])
        found = report(engine)
        assert found.exploration_seconds <= MOST_SHARE * sum(found.seconds_by_length)
    assert report(engine).exploration_seconds > 0
    assert 2 <= drafter.num_read <= 10, "the first requests, and trials"


@pytest.mark.matrix
@pytest.mark.quick
@pytest.mark.parametrize("reading_seconds", [0.02, 0.3, 2.0])
@pytest.mark.parametrize("recorded", [one for one in read() if not one.is_free], ids=lambda one: one.name)
def test_recorded_steps(recorded: RecordedSteps, reading_seconds: float) -> None:
    """Hardly any draft stands, so the governor leaves them alone but for trials."""
    rng, size = random.Random(4), recorded.num_requests
    phases = [Phase(size, [even(0.05, rng, 90) for _ in range(40 * size)])]
    governor = Governor(MOST_RECORDED, compares_unchecked=False)
    warm_up_governor(governor, recorded, MOST_RECORDED, [size])
    simulate(phases, governor, recorded, MOST_RECORDED, compares_unchecked=False, reading_seconds=reading_seconds)
    found = governor.stats()
    assert found.exploration_seconds <= MOST_SHARE * sum(one.seconds for one in found.by_length)
    assert found.exploration_seconds > 0 or reading_seconds > 0.02
