"""The contract of what decides how many drafts a step checks: see `governor` for the one that measures."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from millstream_runtime.engine.speculation.reading_worth import Reading

K = TypeVar("K", bound=Hashable)  # a request


class LengthTotals(NamedTuple):
    """What steps of one draft length gave. Tokens over seconds is their goodput."""

    tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class GovernorStats:
    """What was measured so far. Steps with prompts are not among it."""

    length: float  # drafts per decode of the last step
    by_length: tuple[LengthTotals, ...]  # by the drafts per decode of a step, rounded up
    decode_seconds: float  # those of `by_length`, and `reading_seconds`
    reading_seconds: float  # in which a draft model read prompts
    exploration_seconds: float  # lost to steps that were not the best known, reading for them included
    flips: int  # between drafting and not drafting


class DraftLengths(Protocol):
    """What decides how many of the proposed drafts a step checks.

    Attributes:
        explores: whether steps may be chosen in order to learn.
    """

    explores: bool

    def choose(
        self,
        proposed: Mapping[K, int],
        num_decodes: int,
        *,
        is_crowded: bool,
        reading: Callable[[K], Reading] | None = None,
        num_coming: int = 0,
    ) -> dict[K, int]:
        """Return how many drafts each request of the next step checks, at most `proposed` of it. `num_decodes`:
        requests of the step, also those without drafts. `is_crowded`: requests will soon be refused. `reading`: what
        it takes to read a request before it has drafts, and what is to come of it; None: nothing is read. `num_coming`:
        requests whose prompts are computed now, which will soon be decodes, too."""

    def observe_drafts(self, request: Hashable, num_drafts: int, num_accepted: int) -> None:
        """Learn how many drafts, checked or only compared, were the tokens that came."""

    def observe_step(self, num_decodes: int, num_drafts: int, num_tokens: int, seconds: float) -> None:
        """Learn from a step with decodes alone. `seconds`: of drafting and computing. `num_tokens`: that it gave."""

    def observe_costs(self, num_decodes: int, num_drafts: int, seconds: float) -> None:
        """Learn what a step takes from one that no request was in. `seconds`: of drafting and computing."""

    def observe_reading(self, seconds: float) -> None:
        """Learn that a draft model has read prompts for the step that comes, which is not observed."""

    def forget(self, request: Hashable) -> None:
        """The request has ended."""

    def stats(self) -> GovernorStats | None:
        """Totals since the start."""
