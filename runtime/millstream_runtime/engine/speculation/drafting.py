"""Which requests draft in a step, what they may draft, and the count of all that.

    Drafter.propose -> LengthChoice -> Scheduler.plan -> a check is computed and sampled -> Drafting.count

A step without drafts is always right, so whatever stands against drafting ends in one, with a reason that is counted.
No torch.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq

from millstream_runtime.config import GovernorMode
from millstream_runtime.draft_tree import DraftTree
from millstream_runtime.engine.out_of_memory import is_out_of_memory
from millstream_runtime.engine.request import SpeculationStats
from millstream_runtime.engine.scheduling.sequence import Sequence
from millstream_runtime.engine.scheduling.step_plan import MOST_STEP_DRAFTS, Chunk
from millstream_runtime.engine.speculation.drafter import Drafter
from millstream_runtime.engine.speculation.length_choice import LengthChoice, decodes_alone
from millstream_runtime.engine.speculation.quiet_requests import QuietRequests
from millstream_runtime.engine.speculation.reading_worth import AnswerLengths, Reading
from millstream_runtime.engine.speculation.skip import FOR_GOOD, Skip
from millstream_runtime.logs import log

STEPS_WITHOUT_DRAFTS = 64  # after a step for which there was no memory
WARM_UP_BATCHES = (1, 4, 16)  # whose steps the governor knows from the first request on
FIRST_TIME_STEPS = 2  # of each length and batch size, which are slow
# A drafter that gives NaN for this many requests in a row is not asked again. Each of them has had its prompt read.
MOST_NOT_FINITE_REQUESTS = 3


Proposed = dict[Sequence, list[int]]


class Drafting:
    """See above."""

    def __init__(
        self,
        drafter: Drafter,
        max_draft_tokens: int,
        vocab_size: int,
        most_tokens: Callable[[Sequence], int],
        mode: GovernorMode = GovernorMode.ENFORCE,
        make_room: Callable[[Sequence, int], int] | None = None,
        tree: DraftTree | None = None,
    ) -> None:
        """`most_tokens(sequence)`: how many more tokens may come of it before it ends or its keys become stale.
        `make_room(sequence, num_tokens)`: gives it blocks for these tokens, and returns for how many it has some; None
        for a drafter that writes to none. `tree`: of all drafts; then lengths are in levels of it, and
        `max_draft_tokens` is the number of its levels. None: each draft follows the one before it."""
        self._drafter, self._max_draft_tokens, self._vocab_size = drafter, max_draft_tokens, vocab_size
        self._most_tokens, self._tree = most_tokens, tree
        self._blocked: Skip | None = None
        self.lengths = LengthChoice(max_draft_tokens, mode, is_free=getattr(drafter, "is_free", False))
        self._make_room = make_room
        self._quiet = QuietRequests()
        self._answer_lengths = AnswerLengths()
        # In the last step with decodes: what is left to read of them is little. And in this one.
        self._had_drafts: set[Sequence] = set()
        self._has_drafts: set[Sequence] = set()
        self._num_coming = 0  # requests that will soon be decodes
        self._steps_to_wait = 0
        self._is_warming_up = False
        self._untimed_steps = 0
        self._has_read = False  # whether the drafter has read prompts for this step
        self._refused: dict[Sequence, Skip] = {}
        self._num_not_finite = 0  # requests in a row for which the drafter gave NaN
        self._forget_counts()

    @property
    def needs_last_tokens(self) -> bool:
        """Whether the last token of a decode must be known before the next step is planned: drafts follow it."""
        return self._blocked is None

    def propose(self, running: Seq[Sequence], *, is_crowded: bool = False, num_entering: int = 0) -> Proposed:
        """Return drafts for those decodes that may have some in the next step. `is_crowded`: see `DraftLengths`.
        `num_entering`: requests that wait and will soon be running, too."""
        decodes = [
            one
            for one in running
            if one.num_uncomputed_tokens == 1
            and not one.is_complete
            and (self._is_warming_up or not one.request.is_heartbeat)
        ]
        self._has_read = False
        if not decodes:
            return {}
        self._had_drafts, self._has_drafts = self._has_drafts, set()
        reason = self._reason_of_step()
        if reason is not None:
            self._skipped[reason] += len(decodes)
            return {}
        wanted: dict[Sequence, int] = {}
        share = self._levels_of(_share(len(decodes)))
        asked = self._quiet.to_ask(decodes) if self.lengths.is_free and not self._is_warming_up else decodes
        if len(asked) < len(decodes):
            self._skipped[Skip.NO_PROPOSAL] += len(decodes) - len(asked)
        for one in asked:
            most, reason = self._most_drafts(one, share)
            if reason is None:
                wanted[one] = most
            else:
                self._skipped[reason] += 1
        if not wanted:
            return {}
        self._num_coming = num_entering + sum(one.num_uncomputed_tokens > 1 for one in running)
        return self._proposed(wanted, len(decodes), Skip.CROWDED if is_crowded else Skip.NO_GAIN)

    def _proposed(self, wanted: dict[Sequence, int], num_decodes: int, skip: Skip) -> Proposed:
        """Drafts of as many tokens as the governor chooses. `skip`: why it chooses none."""
        if self._is_warming_up:
            # What is proposed for free depends on the text, which a warm-up has not.
            return (
                {one: [0] * most for one, most in wanted.items()}
                if self.lengths.is_free
                else self._ask_where_room_is(wanted, _share(num_decodes))
            )
        if not self.lengths.is_free:
            chosen = self.lengths.choose(
                wanted,
                num_decodes,
                is_crowded=skip is Skip.CROWDED,
                reading=self._reading,
                num_coming=self._num_coming,
            )
            chosen = chosen if self._reason_of_drafter() is None else {}
            self._skipped[self._reason_of_drafter() or skip] += len(wanted) - len(chosen)
            return self._ask_where_room_is(chosen, _share(num_decodes))
        proposed = self._ask(wanted)
        most = {one: len(drafts) for one, drafts in proposed.items()}
        chosen = self.lengths.choose(most, num_decodes, is_crowded=skip is Skip.CROWDED)
        for one, drafts in proposed.items():
            if one not in chosen:
                self._skipped[skip] += 1
                self.lengths.leave_unchecked(one, drafts)
        return {one: proposed[one][:length] for one, length in chosen.items()}

    def _reading(self, sequence: Sequence) -> Reading:
        """What the drafter takes to read it before it has drafts; 0 where that is little, or the drafter fails."""
        seconds, ask = 0.0, getattr(self._drafter, "reading_seconds", None)

        def find() -> None:
            nonlocal seconds
            seconds = float(ask(sequence)) if ask is not None else 0.0

        if sequence not in self._had_drafts:
            self._call(find)
        coming = self._answer_lengths.expected_tokens(sequence.num_generated_tokens, self._most_tokens(sequence))
        return Reading(seconds, coming, self._answer_lengths.mean_tokens)

    def _ask_where_room_is(self, lengths: Mapping[Sequence, int], share: int) -> Proposed:
        """Ask for drafts of those that have blocks for them. `share`: the most drafts of each."""
        if self._tree is not None:
            lengths = {one: self._tree.num_nodes(levels, share) for one, levels in lengths.items()}
        if self._make_room is None:
            return self._ask(dict(lengths)) if lengths else {}
        wanted: dict[Sequence, int] = {}
        for one, most in lengths.items():
            known = len(one.token_ids)
            has_room = min(most, self._make_room(one, known + most) - known)
            if has_room > 0:
                wanted[one] = has_room
            else:
                self._skipped[Skip.NO_ROOM] += 1
        return self._ask(wanted) if wanted else {}

    def warm_up(self, run: Callable[[int, int], bool]) -> None:
        """Let heartbeats draft, so that no request pays for first-time work and the governor knows what checks take.

        `run(num_requests, num_drafts)` computes a few checks, and returns whether there is time for more. They count
        nowhere else.
        """
        most = self._max_draft_tokens
        self._is_warming_up = True
        for size, self._max_draft_tokens in warm_up_plan(most):
            self._untimed_steps = FIRST_TIME_STEPS
            if not run(size, self._max_draft_tokens):
                break
        self._max_draft_tokens, self._is_warming_up = most, False
        self._forget_counts()

    def left_out(self, proposed: Proposed, planned: Proposed) -> None:
        """Count the proposals for which a step has no room."""
        self._skipped[Skip.NO_ROOM] += len(proposed) - len(planned)

    def count(self, sequence: Sequence, drafts: Seq[int], num_accepted: int) -> None:
        """Count a check that was read."""
        if not self._is_warming_up:
            self.lengths.observe_check(sequence, self._levels_of(len(drafts)), num_accepted)
        self._num_checks += 1
        self._num_draft_tokens += len(drafts)
        for position in range(num_accepted):
            self._accepted_per_position[position] += 1

    def decodes_of(self, chunks: Seq[Chunk]) -> tuple[int, int] | None:
        """Return the decodes of a step and their drafts; None where their time says nothing about requests."""
        return decodes_alone(chunks, are_heartbeats=self._is_warming_up, tree=self._tree)

    def observe_step(
        self, decodes: tuple[int, int] | None, num_tokens: int, step_seconds: float, drafting_seconds: float
    ) -> None:
        """Learn from a step that was read. `decodes`: see `decodes_of`. `num_tokens`: that it gave.

        The time in which a draft model reads prompts is no cost of its drafts: it comes once per request.
        """
        seconds = step_seconds + drafting_seconds
        if self._is_warming_up:
            self._observe_warm_up(decodes, seconds)
        elif self._has_read:
            self.lengths.observe_reading(drafting_seconds)
        elif decodes is not None:
            self.lengths.observe_step(*decodes, num_tokens, seconds)

    def _observe_warm_up(self, decodes: tuple[int, int] | None, seconds: float) -> None:
        if decodes is None or self._has_read:
            return
        num_decodes, num_drafts = decodes
        if num_drafts < num_decodes * min(self._max_draft_tokens, self._levels_of(MOST_STEP_DRAFTS // num_decodes)):
            return
        if self._untimed_steps:
            self._untimed_steps -= 1
        else:
            self.lengths.governor.observe_costs(num_decodes, num_drafts, seconds)

    def refuse(self, sequence: Sequence) -> None:
        """Its check gave numbers that are not finite: it drafts no more."""
        self._refused[sequence] = Skip.NOT_FINITE
        log.warning("check_not_finite", request_id=sequence.request.request_id)

    def wait(self) -> None:
        """There was no memory for a step with drafts."""
        self._steps_to_wait = STEPS_WITHOUT_DRAFTS

    def forget(self, sequence: Sequence) -> None:
        """The request has ended."""
        self._refused.pop(sequence, None)
        self._quiet.forget(sequence)
        self._had_drafts.discard(sequence)
        self._has_drafts.discard(sequence)
        if not sequence.request.is_heartbeat:
            self._answer_lengths.observe_answer(sequence.num_generated_tokens)
        self.lengths.forget(sequence)
        if self._blocked is Skip.DRAFTER_FAILED:  # it is not asked again, and must not hold the request for ever
            with contextlib.suppress(Exception):
                self._drafter.forget(sequence)
        self._call(lambda: self._drafter.forget(sequence))

    def stats(self) -> SpeculationStats:
        """Totals since the start."""
        return SpeculationStats(
            self._num_checks,
            self._num_draft_tokens,
            tuple(self._accepted_per_position),
            {reason.value: self._skipped[reason] for reason in Skip},
            self.lengths.report(),
        )

    def _levels_of(self, num_drafts: int) -> int:
        """How many levels of the tree these drafts fill; of a chain, their number."""
        return num_drafts if self._tree is None else self._tree.levels_of(num_drafts)

    def _forget_counts(self) -> None:
        self._skipped: Counter[Skip] = Counter()
        self._num_checks = self._num_draft_tokens = 0
        self._accepted_per_position = [0] * self._max_draft_tokens

    def _reason_of_step(self) -> Skip | None:
        if self._blocked is not None:
            return self._blocked
        if self._steps_to_wait:
            self._steps_to_wait -= 1
            return Skip.OUT_OF_MEMORY
        return None

    def _most_drafts(self, sequence: Sequence, share: int) -> tuple[int, Skip | None]:
        """`share`: of the drafts of a step, as a length."""
        if sequence.processors and not _follow_generated_ids(sequence.processors):
            return 0, Skip.LOGITS_PROCESSORS
        most = min(self._max_draft_tokens, share, self._most_tokens(sequence) - 1)  # behind drafts comes one more token
        return most, self._refused.get(sequence) if most > 0 else Skip.AT_LIMIT

    def _ask(self, wanted: dict[Sequence, int]) -> Proposed:
        answer: Proposed = {}
        reasons: dict[Sequence, Skip] = {}

        def ask() -> None:
            for sequence, drafts in self._drafter.propose(wanted).items():
                if isinstance(drafts, Skip):
                    reasons[sequence] = drafts
                    if drafts in FOR_GOOD:
                        self._refused[sequence] = drafts
                elif drafts:
                    answer[sequence] = self._usable(drafts, wanted.get(sequence, 0))

        self._call(ask)
        self._has_read = getattr(self._drafter, "has_read_prompts", False)
        proposed = {one: answer[one] for one in wanted if answer.get(one)}
        self._has_drafts = {*proposed}
        if len(proposed) < len(wanted):
            reason = self._reason_of_drafter()
            left = Counter(reason or reasons.get(one, Skip.NO_PROPOSAL) for one in wanted if one not in proposed)
            self._skipped.update(left)
        if self.lengths.is_free:
            self._quiet.observe([one for one in wanted if one not in reasons], proposed)
        self._count_not_finite(reasons.values(), has_drafts=bool(proposed))
        return proposed

    def _count_not_finite(self, reasons: Iterable[Skip], *, has_drafts: bool) -> None:
        """End drafting where no request has drafts for NaN: each new one would have its prompt read for nothing."""
        num_not_finite = sum(reason is Skip.DRAFT_NOT_FINITE for reason in reasons)
        self._num_not_finite = 0 if has_drafts else self._num_not_finite + num_not_finite
        if self._num_not_finite >= MOST_NOT_FINITE_REQUESTS:
            self._fail("DraftNotFinite")

    def _reason_of_drafter(self) -> Skip | None:
        """Why it proposed nothing at all, if it failed."""
        if self._blocked is Skip.DRAFTER_FAILED:
            return self._blocked
        return Skip.OUT_OF_MEMORY if self._steps_to_wait else None

    def _usable(self, drafts: Seq[int], most: int) -> list[int]:
        """The drafts before the first that is no token of the model: it would be looked up in the embedding."""
        usable: list[int] = []
        for token_id in drafts[:most]:
            if type(token_id) is not int or not 0 <= token_id < self._vocab_size:
                break
            usable.append(token_id)
        return usable

    def _call(self, function: Callable[[], None]) -> None:
        """Call the drafter. Drafting ends with its first error, no request does. Without memory, drafting waits."""
        if self._blocked is Skip.DRAFTER_FAILED:
            return
        try:
            function()
        except Exception as error:
            if is_out_of_memory(error):
                self.wait()
                return
            self._fail(type(error).__name__)  # its message might quote a request

    def _fail(self, error: str) -> None:
        self._blocked = Skip.DRAFTER_FAILED
        log.warning("drafter_failed", error=error)


def _follow_generated_ids(processors: Iterable[object]) -> bool:
    """Whether all of them depend on the generated tokens alone, so that they can be applied behind drafts."""
    return all(getattr(one, "follows_generated_ids", False) for one in processors)


def warm_up_plan(max_draft_tokens: int) -> list[tuple[int, int]]:
    """Return the checks of a warm-up in their order: requests at once, and drafts of each."""
    ends = [0, max_draft_tokens, *({1} - {max_draft_tokens})]
    plan = [(size, length) for size in WARM_UP_BATCHES for length in ends]
    return plan + [(1, length) for length in range(2, max_draft_tokens)]


def _share(num_decodes: int) -> int:
    """How many of a step's drafts each of its decodes may have."""
    return max(1, MOST_STEP_DRAFTS // num_decodes)
