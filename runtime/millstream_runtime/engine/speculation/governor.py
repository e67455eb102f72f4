"""How many drafts each decode of a step checks: what gives the most tokens per second, by what was measured.

    choose -> a step with so many drafts -> observe_step, observe_drafts -> choose ...

`Acceptance` says which drafts are likely to stand, `StepCosts` what a step with them takes (one per bucket of batch
sizes; the time of drafting included), `goodput` puts both together. What is left here are three rules:

- Hysteresis. A batch begins to draft where that promises `LEAST_GAIN` more, and stops where it gives less than none.
- Exploration. What was not timed for long is tried, and sooner what may be the best: a step without drafts where there
  are always some, a step with drafts where there are none. The seconds this loses stay below 1 % of all seconds of
  decoding, those included in which a draft model reads prompts for a trial: what that will take is known before.
- Load. While the queue is long, before requests are refused, nothing drafts and nothing is tried.

A draft length that follows goodput is TurboSpec's (Liu et al. 2024, arXiv 2406.14066). No torch, no clock, no
randomness: equal observations lead to equal choices.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

from millstream_runtime.engine.speculation.acceptance import Acceptance
from millstream_runtime.engine.speculation.draft_lengths import GovernorStats, K, LengthTotals
from millstream_runtime.engine.speculation.goodput import Goodput, best_goodput, lengths_from, likeliest_first
from millstream_runtime.engine.speculation.reading_worth import (
    Reading,
    ReadingPrice,
    before_the_end,
    worth_drafting,
)
from millstream_runtime.engine.speculation.step_costs import StepCosts

LEAST_GAIN = 1.02
# The same where reading prompts is a part of it: to stop and begin again costs more, as requests are read in vain.
LEAST_GAIN_TO_GO_ON, NEW_GAIN_SHARE = 0.98, 0.02
# Of the seconds of decoding. What trials lose beyond what was expected of them comes on top, and delays the next.
PLANNED_EXPLORATION = 0.008
STALE_STEPS, MOST_STALE_STEPS = 256, 4096  # since a length was timed, until it is tried again
# The same of a length that is expected to be nearly as good as the best: it may be better.
CLOSE_STEPS, CLOSE_GOODPUT = 32, 0.8
LOOK_STEPS = 4  # of which one looks for a trial, where none and all drafts were timed: looking takes time, too
SURPRISE = 0.85  # a trial without drafts that takes less than this part of what was expected is repeated soon
MOST_PASSED_OVER = 8  # requests whose reading is too long for a trial, until none is tried
EXPECTED_CHECKS = 3  # a model's drafts are expected to stand as if so many had stood before the first request
# Batch sizes above each of these share their times with those up to the next.
BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


@dataclass(slots=True)
class _Bucket:
    """What is known of steps of about one batch size."""

    costs: StepCosts
    drafts: bool = False  # whether steps draft, apart from trials
    reads: bool = True  # whether requests that come to others that draft are read
    gain: float | None = None  # of drafts, reading included; smoothed
    patience_steps: dict[int, int] = field(default_factory=dict)  # until a length is tried again

    def is_due(self, length: int, *, is_close: bool) -> bool:
        """Whether steps of this length were not timed for long. `is_close`: it is expected to be nearly the best."""
        patience = CLOSE_STEPS if is_close else self._patience_steps(length)
        return not self.costs.is_timed(length) or self.costs.age_steps(length) > patience

    def looks_for_trial(self, longest: int) -> bool:
        """Whether the next step does."""
        are_timed = self.costs.is_timed(0) and self.costs.is_timed(1) and self.costs.is_timed(longest)
        return not are_timed or self.costs.num_steps % LOOK_STEPS == 0

    def tried(self, length: int, *, is_close: bool) -> None:
        """The next trial of this length waits twice as long: what was slower before is seldom quicker now."""
        if self.costs.is_timed(length) and not is_close:
            self.patience_steps[length] = min(2 * self._patience_steps(length), MOST_STALE_STEPS)

    def observe_gain(self, gain: float) -> None:
        """Learn what drafts of all requests would gain now, reading included, and decide whether more are read."""
        self.gain = gain if self.gain is None else self.gain + NEW_GAIN_SHARE * (gain - self.gain)
        self.reads = self.gain >= (LEAST_GAIN_TO_GO_ON if self.reads else LEAST_GAIN)

    def _patience_steps(self, length: int) -> int:
        return self.patience_steps.get(length, STALE_STEPS)


@dataclass(frozen=True, slots=True)
class _Trial:
    """A step that was chosen in order to learn. `usual`: what was thought best."""

    tokens: float
    usual: Goodput
    expected_loss_seconds: float = field(default=0.0)


class Governor:
    """See above. `max_draft_tokens`: of one decode."""

    def __init__(self, max_draft_tokens: int, *, compares_unchecked: bool = True) -> None:
        """`compares_unchecked`: drafts that are not checked are observed too, as they cost nothing."""
        self.explores = True
        self._max_draft_tokens = max_draft_tokens
        self._acceptance = Acceptance(max_draft_tokens)
        self._buckets: dict[int, _Bucket] = {}
        self._trial: _Trial | None = None
        self._saves_for_step = False  # whether there is a length to be tried for which the budget is too small yet
        self._compares_unchecked = compares_unchecked
        if not compares_unchecked:
            # Drafts of a model are not seen unless they are paid for, so the first requests are given a chance.
            for _ in range(EXPECTED_CHECKS):
                self._acceptance.observe(None, max_draft_tokens, max_draft_tokens)
            self._acceptance.forget(None)
        self._unseen_steps: dict[Hashable, int] = {}  # since drafts of a request were observed
        self._reading_price = ReadingPrice()
        self._by_length = [LengthTotals()] * (max_draft_tokens + 1)
        self._length = self._step_seconds = self._reading_seconds = self._exploration_seconds = 0.0
        self._flips = 0

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
        self._end_trial()
        if is_crowded or not proposed:
            return {}
        bucket = self._bucket_to_choose_by(num_decodes)
        if not bucket.costs.is_timed(0):
            return {}
        marginals = {one: self._acceptance.marginals(one)[:most] for one, most in proposed.items()}
        worth: Mapping[K, list[float]] = marginals
        found: dict[K, Reading] = {}
        if reading is not None:
            found = {one: reading(one) for one in marginals}
            marginals = {one: before_the_end(of, found[one].answer_tokens) for one, of in marginals.items()}
            worth = self._without_unworthy(bucket, marginals, num_decodes, found, num_coming)
        likeliest = likeliest_first(worth)
        usual = self._usual(bucket, num_decodes, likeliest)
        looks = not self._compares_unchecked or bucket.looks_for_trial(self._max_draft_tokens)
        tried = self._try_step(bucket, num_decodes, marginals, usual, found) if looks else None
        if tried is not None:
            return {one: min(tried, len(of)) for one, of in marginals.items()} if tried else {}
        if not usual.num_drafts:
            return self._try_request(bucket, marginals, num_decodes, usual, found)
        return lengths_from(worth, likeliest[usual.num_drafts - 1])

    def observe_drafts(self, request: Hashable, num_drafts: int, num_accepted: int) -> None:
        """See `DraftLengths.observe_drafts`."""
        self._unseen_steps.pop(request, None)
        self._acceptance.observe(request, num_drafts, num_accepted)

    def observe_step(self, num_decodes: int, num_drafts: int, num_tokens: int, seconds: float) -> None:
        """See `DraftLengths.observe_step`."""
        bucket = self._bucket(num_decodes)
        length, costs = num_drafts / num_decodes, bucket.costs
        if self._trial is not None and not num_drafts and seconds < SURPRISE * costs.seconds(0):
            bucket.patience_steps[0] = CLOSE_STEPS
        costs.observe(length, seconds)
        self._length = length
        self._step_seconds += seconds
        rounded = -(-num_drafts // num_decodes)
        tokens_before, seconds_before = self._by_length[rounded]
        self._by_length[rounded] = LengthTotals(tokens_before + num_tokens, seconds_before + seconds)
        if self._trial is not None:
            trial, self._trial = self._trial, None
            # By what such steps take: that another process held this one up is no loss of the trial.
            self._exploration_seconds += max(0.0, costs.seconds(length) - trial.tokens / trial.usual.tokens_per_second)

    def observe_costs(self, num_decodes: int, num_drafts: int, seconds: float) -> None:
        """See `DraftLengths.observe_costs`."""
        self._bucket(num_decodes).costs.observe(num_drafts / num_decodes, seconds)

    def observe_reading(self, seconds: float) -> None:
        """See `DraftLengths.observe_reading`. In a trial it is a loss, which delays the next."""
        self._reading_seconds += seconds
        if self._trial is not None:
            self._trial = None
            self._exploration_seconds += seconds

    def forget(self, request: Hashable) -> None:
        """See `DraftLengths.forget`."""
        self._acceptance.forget(request)
        self._reading_price.forget(request)
        self._unseen_steps.pop(request, None)

    def stats(self) -> GovernorStats:
        """See `DraftLengths.stats`."""
        return GovernorStats(
            self._length,
            tuple(self._by_length),
            self._step_seconds + self._reading_seconds,
            self._reading_seconds,
            self._exploration_seconds,
            self._flips,
        )

    def _bucket(self, num_decodes: int) -> _Bucket:
        place = bisect.bisect_left(BUCKETS, num_decodes)
        bucket = self._buckets.get(place)
        if bucket is None:
            bucket = self._buckets[place] = _Bucket(StepCosts(self._max_draft_tokens))
        return bucket

    def _bucket_to_choose_by(self, num_decodes: int) -> _Bucket:
        """The bucket, which takes what drafts cost from another batch size while it has not timed them."""
        bucket = self._bucket(num_decodes)
        if not bucket.costs.knows_drafts:
            place = bisect.bisect_left(BUCKETS, num_decodes)
            # In a larger batch drafts weigh more, so it is the safer guess.
            known = [one for one, other in self._buckets.items() if other.costs.knows_drafts]
            nearest = min(known, key=lambda one: (one < place, abs(one - place)), default=None)
            bucket.costs.other = None if nearest is None else self._buckets[nearest].costs
        return bucket

    def _usual(self, bucket: _Bucket, num_decodes: int, likeliest: list[float]) -> Goodput:
        """The best number of drafts, or none where they gain too little to begin with them."""
        line = bucket.costs.line()
        best = best_goodput(num_decodes, likeliest, line)
        none = Goodput(0, float(num_decodes), line[0])
        gain = best.tokens_per_second / none.tokens_per_second
        drafts = best.num_drafts > 0 and (bucket.drafts or gain >= LEAST_GAIN)
        if drafts != bucket.drafts:
            bucket.drafts = drafts
            self._flips += 1
        return best if drafts else none

    def _without_unworthy(
        self,
        bucket: _Bucket,
        marginals: Mapping[K, list[float]],
        num_decodes: int,
        found: Mapping[K, Reading],
        num_coming: int,
    ) -> Mapping[K, list[float]]:
        """Leave out the requests whose drafts would save less than it takes to read them."""
        line = bucket.costs.line()
        plain_seconds = line[0] / num_decodes  # of a token
        self._reading_price.observe(found, plain_seconds)
        unread = {one: of for one, of in found.items() if of.seconds > 0}
        if not unread:
            return marginals
        if num_coming and not self._drafts_with(num_decodes + num_coming, marginals):
            return {one: of for one, of in marginals.items() if one not in unread}
        if len(unread) == len(marginals):
            return worth_drafting(marginals, num_decodes, line, unread)
        # Others draft already, and batches of which only a part drafts are the slowest: so it is decided for all that
        # come, by what reading took of those before them.
        best = best_goodput(num_decodes, likeliest_first(marginals), line)
        bucket.observe_gain(plain_seconds / (best.seconds / best.tokens + self._reading_price.seconds_per_token))
        return {
            one: of
            for one, of in marginals.items()
            if one not in unread or (bucket.reads and unread[one].seconds <= plain_seconds * unread[one].coming_tokens)
        }

    def _drafts_with(self, num_decodes: int, marginals: Mapping[K, list[float]]) -> bool:
        """Whether `num_decodes` requests like these would draft: if not, what is read for a few of them is in vain."""
        costs = self._bucket_to_choose_by(num_decodes).costs
        if not costs.is_timed(0):
            return True
        of_each = -(-num_decodes // len(marginals))
        likeliest = [one for one in likeliest_first(marginals) for _ in range(of_each)]
        best = best_goodput(num_decodes, likeliest[: num_decodes * self._max_draft_tokens], costs.line())
        return best.tokens_per_second >= LEAST_GAIN * num_decodes / costs.seconds(0)

    def _try_step(
        self,
        bucket: _Bucket,
        num_decodes: int,
        marginals: Mapping[K, list[float]],
        usual: Goodput,
        found: Mapping[K, Reading],
    ) -> int | None:
        """A length whose time is unknown or old, for all requests of a step; None where nothing is to be tried."""
        self._saves_for_step = False
        longest = max(len(of) for of in marginals.values())
        reading_all: float | None = None
        by_length: list[tuple[int, float]] | None = None
        now = -(-usual.num_drafts // num_decodes)
        for length in (longest, 1, 0, now + 1, now - 1):
            if not 0 <= length <= longest or length == now or not bucket.is_due(length, is_close=True):
                continue
            by_length = by_length or _drafts_by_length(marginals, longest)
            num_drafts, standing = by_length[length]
            seconds = bucket.costs.seconds(num_drafts / num_decodes)
            trial = Goodput(num_drafts, num_decodes + standing, seconds)
            is_close = trial.tokens_per_second >= CLOSE_GOODPUT * usual.tokens_per_second
            if not bucket.is_due(length, is_close=is_close):
                continue
            if not self._may_try(trial, usual):
                self._saves_for_step |= is_close
                continue
            if reading_all is None:
                reading_all = sum(of.seconds for of in found.values())
            if self._begin_trial(trial, usual, reading_all if length else 0.0):
                bucket.tried(length, is_close=is_close)
                return length
        return None

    def _try_request(
        self,
        bucket: _Bucket,
        marginals: Mapping[K, list[float]],
        num_decodes: int,
        usual: Goodput,
        found: Mapping[K, Reading],
    ) -> dict[K, int]:
        """Drafts of the request of which none were seen for longest: it may have become easier to guess."""
        if self._compares_unchecked or self._saves_for_step:
            return {}
        for request in marginals:
            self._unseen_steps[request] = self._unseen_steps.get(request, 0) + 1
        # One that takes too long to read is passed over for the next, or no other would be tried.
        for oldest in heapq.nlargest(MOST_PASSED_OVER, marginals, key=lambda one: self._unseen_steps[one]):
            drafts = marginals[oldest][:1]  # the cheapest: whether the first stands says most about those behind it
            seconds = bucket.costs.seconds(len(drafts) / num_decodes)
            trial = Goodput(len(drafts), num_decodes + sum(drafts), seconds)
            if not self._may_try(trial, usual):
                break
            if self._begin_trial(trial, usual, found[oldest].seconds if found else 0.0):
                return {oldest: len(drafts)}
        return {}

    def _may_try(self, trial: Goodput, usual: Goodput, reading_seconds: float = 0.0) -> bool:
        """Whether what a trial is expected to lose is within the budget."""
        loss = _loss_seconds(trial, usual) + reading_seconds
        return self.explores and self._exploration_seconds + loss <= PLANNED_EXPLORATION * self._step_seconds

    def _begin_trial(self, trial: Goodput, usual: Goodput, reading_seconds: float) -> bool:
        """Begin it if it may be tried. `reading_seconds`: of all its requests."""
        if not self._may_try(trial, usual, reading_seconds):
            return False
        self._trial = _Trial(trial.tokens, usual, _loss_seconds(trial, usual))
        return True

    def _end_trial(self) -> None:
        """Count a trial whose step was not timed, since it had prompts, at what it was expected to lose."""
        if self._trial is not None:
            self._exploration_seconds += self._trial.expected_loss_seconds
            self._trial = None


def _loss_seconds(trial: Goodput, usual: Goodput) -> float:
    return max(0.0, trial.seconds - trial.tokens / usual.tokens_per_second)


def _drafts_by_length(marginals: Mapping[K, list[float]], longest: int) -> list[tuple[int, float]]:
    """How many drafts a step checks if each request checks 0, 1, 2, .. of its own, and how many should stand."""
    num_drafts, standing = 0, 0.0
    by_length = [(num_drafts, standing)]
    for place in range(longest):
        of_place = [of[place] for of in marginals.values() if place < len(of)]
        num_drafts, standing = num_drafts + len(of_place), standing + sum(of_place)
        by_length.append((num_drafts, standing))
    return by_length
