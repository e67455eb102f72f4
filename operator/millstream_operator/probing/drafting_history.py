"""Whether the pods of one LLMDeployment draft, and how many drafts stand, smoothed. Pure; seconds are monotonic.

    counts of a pod -> what came since the last answer -> sums that fade -> Drafting

A governor changes its mind within milliseconds, and each pod has its own. So what counts is the share of decodes that
drafted among those that could, of all pods together: most of them drafted, or most did not for minutes. Between a
quarter and three quarters nothing changes, and after a change nothing does for ten minutes: pods that flip at random
cause no entry in the journal, or one in ten minutes. Without decodes nothing changes either. A drafter that has failed
drafts no more, so one answer says it, whatever the share.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace

from millstream_operator.api.status import MOST_FAILED_PODS

STATE_HALF_LIFE_SECONDS, ACCEPTANCE_HALF_LIFE_SECONDS = 120.0, 600.0
STOPPED_BELOW, DRAFTS_ABOVE = 0.25, 0.75  # of the decodes that could draft
LEAST_SECONDS_BETWEEN_CHANGES = 600.0
LEAST_DECODES, LEAST_DRAFT_TOKENS = 20.0, 200.0  # fewer say little
LEAST_CHANGE_POINTS = 10  # of an acceptance that was reported
_LARGEST = 1 << 53


@dataclass(frozen=True, slots=True)
class SpeculationCounts:
    """Totals of one pod since its engine started; or their growth."""

    checks: int  # decodes that drafted
    draft_tokens: int
    accepted_tokens: int
    without_gain: int  # decodes that did not draft, since the governor expects no gain
    drafter_failed: int  # decodes that did not draft, since the drafter raised an error or gave NaN

    def since(self, before: SpeculationCounts) -> SpeculationCounts | None:
        """Return the growth since `before`; None where a number fell, as after a restart of the engine."""
        growth = [getattr(self, one.name) - getattr(before, one.name) for one in fields(self)]
        return SpeculationCounts(*growth) if min(growth) >= 0 else None


@dataclass(frozen=True, slots=True)
class Drafting:
    """What holds for the pods of a revision. `accepted_percent` None: too few drafts were checked to say."""

    is_drafting: bool
    accepted_percent: int | None = None
    has_failed: bool = False  # it is off since a drafter failed, and not for want of a gain
    failed_pods: tuple[str, ...] = ()  # names, sorted: those whose drafter failed, however few


def read_speculation_counts(body: object) -> SpeculationCounts | None:
    """Return the totals in the body of `/ready`; None where it has none. The body is untrusted."""
    found = _mapping(_mapping(body).get("speculation"))
    skipped = _mapping(found.get("skipped"))
    numbers = [found.get(name) for name in ("checks", "draftTokens", "acceptedTokens")]
    numbers += [skipped.get(reason, 0) for reason in ("no_gain", "drafter_failed")]
    totals = [one for one in numbers if type(one) is int and 0 <= one <= _LARGEST]
    if len(totals) < len(numbers) or totals[2] > totals[1]:
        return None
    return SpeculationCounts(*totals)


class DraftingHistory:
    """Of one revision. `known`: what the status says of it, and for how many seconds; None: it says nothing."""

    def __init__(self, known: Drafting | None = None, changed_at: float = float("-inf")) -> None:
        self.drafting = known
        self._changed_at = changed_at
        self._checks, self._without_gain, self._failed = (_Fading(STATE_HALF_LIFE_SECONDS) for _ in range(3))
        self._draft_tokens, self._accepted_tokens = (_Fading(ACCEPTANCE_HALF_LIFE_SECONDS) for _ in range(2))

    def add(self, growth: SpeculationCounts, now: float) -> bool:
        """Add what one pod did since its last answer. Return whether `drafting` has changed."""
        if not growth.checks + growth.without_gain + growth.drafter_failed:
            return False
        checks, without_gain, failed, draft_tokens, accepted_tokens = (
            sums.add(amount, now)
            for sums, amount in (
                (self._checks, growth.checks),
                (self._without_gain, growth.without_gain),
                (self._failed, growth.drafter_failed),
                (self._draft_tokens, growth.draft_tokens),
                (self._accepted_tokens, growth.accepted_tokens),
            )
        )
        decodes = checks + without_gain + failed
        if decodes < LEAST_DECODES:
            return False
        before = self.drafting
        was = before or Drafting(is_drafting=True)  # the plan says so
        is_drafting = self._is_drafting(was.is_drafting, checks / decodes, now)
        percent = round(100 * accepted_tokens / draft_tokens) if draft_tokens >= LEAST_DRAFT_TOKENS else None
        has_changed = is_drafting != was.is_drafting
        if percent is None or not (has_changed or _is_news(was.accepted_percent, percent)):
            percent = was.accepted_percent
        has_failed = failed > without_gain if has_changed else was.has_failed
        self.drafting = Drafting(is_drafting, percent, has_failed and not is_drafting, was.failed_pods)
        return self.drafting != before

    def set_failed(self, pod: str, *, has_failed: bool) -> bool:
        """Add or remove a pod whose drafter failed since it was started. Return whether `drafting` has changed."""
        known = () if self.drafting is None else self.drafting.failed_pods
        if has_failed == (pod in known) or (has_failed and len(known) >= MOST_FAILED_PODS):
            return False
        return self._name_failed({*known, pod} if has_failed else {*known} - {pod})

    def keep_failed(self, pods: Collection[str]) -> bool:
        """Forget pods that are not there any more. Return whether `drafting` has changed."""
        known = () if self.drafting is None else self.drafting.failed_pods
        return self._name_failed({*known} & {*pods}) if {*known} - {*pods} else False

    def _name_failed(self, pods: Collection[str]) -> bool:
        was = self.drafting or Drafting(is_drafting=True)
        self.drafting = replace(was, failed_pods=tuple(sorted(pods)))
        return True

    def _is_drafting(self, was: bool, share: float, now: float) -> bool:
        """`share`: of the decodes that drafted, among those that could."""
        wanted = True if share > DRAFTS_ABOVE else False if share < STOPPED_BELOW else was
        if wanted == was or now - self._changed_at < LEAST_SECONDS_BETWEEN_CHANGES:
            return was
        self._changed_at = now
        return wanted


class _Fading:
    """A sum whose parts lose half of their weight in every half-life."""

    def __init__(self, half_life_seconds: float) -> None:
        self._half_life_seconds = half_life_seconds
        self._sum, self._at = 0.0, 0.0

    def add(self, amount: float, now: float) -> float:
        self._sum = self._sum * 0.5 ** ((now - self._at) / self._half_life_seconds) + amount
        self._at = now
        return self._sum


def _is_news(reported: int | None, percent: int) -> bool:
    return reported is None or abs(percent - reported) >= LEAST_CHANGE_POINTS


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}
