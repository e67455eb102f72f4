"""Decode steps without a model: how long they take, which drafts stand, and what a choice of draft lengths gains.

A request is a list of booleans: whether the draft in each place of its answer would be right. A check stands up to the
first that is not, as in the engine. So any two choices meet the same requests, and only their seconds differ.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from millstream_runtime.engine.scheduling.step_plan import MOST_STEP_DRAFTS
from millstream_runtime.engine.speculation.draft_lengths import DraftLengths
from millstream_runtime.engine.speculation.drafting import FIRST_TIME_STEPS, WARM_UP_BATCHES, warm_up_plan
from millstream_runtime.engine.speculation.reading_worth import AnswerLengths, Reading
from millstream_runtime.engine.warm_up import CHECKS, MOST_DRAFTS_SECONDS

Answer = Seq[bool]
MOST_ANSWER_TOKENS = 256  # that a request allows: what is expected of the first answers
K = TypeVar("K", bound=Hashable)


class StepSeconds(Protocol):
    """What steps take."""

    def seconds(self, num_decodes: int, lengths: Seq[int], rng: random.Random) -> float:
        """Return what one step takes. `lengths`: of its checks."""


@dataclass(frozen=True)
class Costs:
    """Seconds of a step: a line in the decodes, and per check and draft. By default as measured on the demo pair.

    One token takes 1.34 ms, six rows 2.37; at four requests 1.99 and 7.3 (each check is a call of attention).
    """

    base_ms: float = 1.12
    decode_ms: float = 0.22
    check_ms: float = 0.5
    row_ms: float = 0.11
    more_checks_ms: float = 0.12  # a row, per further check
    draft_ms: float = 0.0  # per draft of the longest run: a draft model
    noise: float = 0.05
    slow_share: float = 0.01  # steps that another process makes three times as long

    def seconds(self, num_decodes: int, lengths: Seq[int], rng: random.Random) -> float:
        """See `StepSeconds.seconds`."""
        rows = sum(lengths)
        exact = self.base_ms + self.decode_ms * num_decodes + self.draft_ms * max(lengths, default=0)
        others = min(max(len(lengths) - 1, 0), 3)
        exact += self.check_ms * len(lengths) + rows * (self.row_ms + self.more_checks_ms * others / 3)
        slow = 3.0 if rng.random() < self.slow_share else 1.0
        return exact * slow * rng.lognormvariate(0, self.noise) / 1000


DEMO_NGRAM = Costs()
DEMO_DRAFT = Costs(draft_ms=0.48)
# The demo pair on a machine with other work, where one token took 3.3 ms, a pass of the draft model 1.3.
BUSY_DRAFT = Costs(base_ms=2.6, decode_ms=0.6, check_ms=0.9, row_ms=0.15, more_checks_ms=0.05, draft_ms=1.3, noise=0.3)
ONE_CALL = Costs(base_ms=28.0, decode_ms=0.9, check_ms=1.0, row_ms=1.2, more_checks_ms=0.0)  # the 135 M shape


@dataclass(frozen=True)
class Phase:
    """`answers` are given by `concurrency` requests at once."""

    concurrency: int
    answers: Seq[Answer]


@dataclass
class Run:
    """What a choice of lengths took. `timeline`: after each step, the seconds and tokens so far and its drafts."""

    seconds: float = 0.0
    tokens: int = 0
    timeline: list[tuple[float, int, int]] = field(default_factory=list)
    phase_began_at_seconds: list[float] = field(default_factory=list)


class Fixed:
    """Always the same length."""

    def __init__(self, length: int) -> None:
        self.explores = False
        self._length = length

    def choose(
        self,
        proposed: Mapping[K, int],
        num_decodes: int,
        *,
        is_crowded: bool,
        reading: Callable[[K], Reading] | None = None,
        num_coming: int = 0,
    ) -> dict[K, int]:
        """See `DraftLengths.choose`."""
        return {one: min(self._length, most) for one, most in proposed.items() if self._length}

    def observe_drafts(self, request: Hashable, num_drafts: int, num_accepted: int) -> None:
        """See `DraftLengths.observe_drafts`."""

    def observe_step(self, num_decodes: int, num_drafts: int, num_tokens: int, seconds: float) -> None:
        """See `DraftLengths.observe_step`."""

    def observe_costs(self, num_decodes: int, num_drafts: int, seconds: float) -> None:
        """See `DraftLengths.observe_costs`."""

    def observe_reading(self, seconds: float) -> None:
        """See `DraftLengths.observe_reading`."""

    def forget(self, request: Hashable) -> None:
        """See `DraftLengths.forget`."""

    def stats(self) -> None:
        """See `DraftLengths.stats`."""


@dataclass
class _Live:
    answer: Answer
    done: int = 0
    compared_from: int | None = None  # drafts that were not checked wait here for the tokens that come
    unread_seconds: float = 0.0  # what a draft model takes to read it


def simulate(
    phases: Iterable[Phase],
    choice: DraftLengths,
    costs: StepSeconds,
    max_draft_tokens: int,
    *,
    compares_unchecked: bool = True,
    reading_seconds: float = 0.0,
    seed: int = 0,
) -> Run:
    """Answer all requests of all phases. `reading_seconds`: of each before its first drafts, by a draft model."""
    run, rng, number, answer_lengths = Run(), random.Random(seed), 0, AnswerLengths()
    for phase in phases:
        run.phase_began_at_seconds.append(run.seconds)
        waiting: Iterator[Answer] = iter(phase.answers)
        live: dict[int, _Live] = {}
        while True:
            while len(live) < phase.concurrency and (answer := next(waiting, None)) is not None:
                live[number], number = _Live(answer, unread_seconds=reading_seconds), number + 1
            if not live:
                break
            _step(run, live, choice, costs, max_draft_tokens, compares_unchecked, rng, answer_lengths)
    return run


def warm_up(
    choice: DraftLengths, costs: StepSeconds, max_draft_tokens: int, batches: Seq[int] = WARM_UP_BATCHES, seed: int = 0
) -> None:
    """Let it learn what steps take, as an engine's warm-up does: the same steps, for as long.

    `batches`: of those that an engine runs, for costs that know no others.
    """
    rng, seconds = random.Random(seed), 0.0
    for size, most in warm_up_plan(max_draft_tokens):
        if size not in batches:
            continue
        length = min(most, max(1, MOST_STEP_DRAFTS // size))
        for check in range(1 + CHECKS):  # the first step reads the prompts
            took = costs.seconds(size, [length] * size if length else [], rng)
            seconds += took
            if check > FIRST_TIME_STEPS:
                choice.observe_costs(size, size * length, took)
        if seconds >= MOST_DRAFTS_SECONDS:
            return


def _step(
    run: Run,
    live: dict[int, _Live],
    choice: DraftLengths,
    costs: StepSeconds,
    most: int,
    compares_unchecked: bool,
    rng: random.Random,
    answer_lengths: AnswerLengths,
) -> None:
    num_decodes = len(live)
    share = min(most, max(1, MOST_STEP_DRAFTS // num_decodes))
    proposed = {key: min(share, len(one.answer) - one.done - 1) for key, one in live.items()}
    proposed = {key: length for key, length in proposed.items() if length > 0}
    unread = {key: one.unread_seconds for key, one in live.items()}

    def reading_of(key: int) -> Reading:
        one = live[key]
        return Reading(unread[key], answer_lengths.expected_tokens(one.done, MOST_ANSWER_TOKENS - one.done))

    lengths = choice.choose(proposed, num_decodes, is_crowded=False, reading=reading_of)
    tokens = 0
    for key, one in [*live.items()]:
        length = lengths.get(key, 0)
        if length:
            one.unread_seconds = 0.0
            accepted = _standing(one.answer[one.done : one.done + length])
            choice.observe_drafts(key, length, accepted)
            one.compared_from = None
        else:
            accepted = 0
            if compares_unchecked and one.compared_from is None:
                one.compared_from = one.done
        one.done += accepted + 1
        tokens += accepted + 1
        if one.compared_from is not None and one.done >= one.compared_from + most:
            seen = one.answer[one.compared_from : one.compared_from + most]
            choice.observe_drafts(key, len(seen), _standing(seen))
            one.compared_from = None
        if one.done >= len(one.answer):
            choice.forget(key)
            answer_lengths.observe_answer(one.done)
            del live[key]
    seconds = costs.seconds(num_decodes, [*lengths.values()], rng)
    reading = sum(unread[key] for key in lengths)
    if reading:
        choice.observe_reading(reading)
    else:
        choice.observe_step(num_decodes, sum(lengths.values()), tokens, seconds)
    run.seconds += seconds + reading
    run.tokens += tokens
    run.timeline.append((run.seconds, run.tokens, sum(lengths.values())))


def _standing(drafts: Answer) -> int:
    for place, is_right in enumerate(drafts):
        if not is_right:
            return place
    return len(drafts)


def even(rate: float, rng: random.Random, length: int = 200) -> Answer:
    """An answer of which each draft is right with the same probability."""
    return [rng.random() < rate for _ in range(length)]


def in_runs(rate: float, rng: random.Random, length: int = 200, run_tokens: float = 20.0) -> Answer:
    """An answer with quoted passages: drafts are right in long runs, `rate` of them in all."""
    inside, answer = rng.random() < rate, []
    leave = 1 / run_tokens
    enter = leave * rate / (1 - rate)
    for _ in range(length):
        answer.append(inside)
        inside = rng.random() >= leave if inside else rng.random() < enter
    return answer


Make = Callable[[random.Random], Answer]
KINDS: dict[str, Make] = {
    "chat": lambda rng: even(0.68, rng),
    "code": lambda rng: in_runs(0.8, rng),
    "creative": lambda rng: even(0.13, rng),
    "own text": lambda rng: even(0.998, rng),
    "retrieval": lambda rng: in_runs(0.5, rng),
}


def answers(kinds: Seq[str], count: int, rng: random.Random) -> list[Answer]:
    """Return `count` answers of kinds in turn."""
    return [KINDS[kinds[index % len(kinds)]](rng) for index in range(count)]


def scenarios(seed: int = 1) -> dict[str, list[Phase]]:
    """Synthetic traces: steady, drifting, stepping load, and mixtures."""
    rng = random.Random(seed)
    every = [*KINDS]
    drift = [even(0.1 + 0.8 * index / 99, rng) for index in range(100)]
    found = {
        f"{kind} at {size}": [Phase(size, answers([kind], 40 + 10 * size, rng))]
        for kind in KINDS
        for size in (1, 4, 16)
    }
    found["mixture at 1"] = [Phase(1, answers(every, 80, rng))]
    found["mixture at 8"] = [Phase(8, answers(every, 160, rng))]
    found["one creative among chats"] = [Phase(4, answers(["own text", "own text", "own text", "creative"], 100, rng))]
    found["drift"] = [Phase(1, drift), Phase(1, drift[::-1])]
    found["load steps"] = [Phase(size, answers(["chat"], 30 * size, rng)) for size in (1, 16, 2, 8, 1)]
    found["flips"] = [Phase(1, answers([kind], 40, rng)) for kind in ("creative", "own text", "creative", "code")]
    return found
