"""How many drafts each decode of a step checks, by the mode of the governor, and what the governor learns from.

    Enforce    what the governor chooses
    Observe    all that may be proposed; the governor learns, and says what it would choose
    Disabled   all that may be proposed

Where proposals are free, as those of n-grams, they are made before their number is chosen. Those that are not checked
are compared with the tokens that come, so the governor learns of a request that it leaves alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

from millstream_runtime.config import GovernorMode
from millstream_runtime.draft_tree import DraftTree
from millstream_runtime.engine.request import GovernorReport
from millstream_runtime.engine.scheduling.sequence import Sequence
from millstream_runtime.engine.scheduling.step_plan import Chunk
from millstream_runtime.engine.speculation.draft_lengths import DraftLengths
from millstream_runtime.engine.speculation.governor import Governor
from millstream_runtime.engine.speculation.reading_worth import Reading


class LengthChoice:
    """See above. `mode` may change at any time: what was learned is kept."""

    def __init__(self, max_draft_tokens: int, mode: GovernorMode, *, is_free: bool) -> None:
        """`is_free`: proposals cost next to nothing."""
        self.mode = mode
        self.is_free = is_free
        self.governor: DraftLengths = Governor(max_draft_tokens, compares_unchecked=is_free)
        # Drafts that were not checked, and how many tokens were known before them.
        self._compared: dict[Sequence, tuple[int, list[int]]] = {}
        self._chosen_length = 0.0

    def choose(
        self,
        most: Mapping[Sequence, int],
        num_decodes: int,
        *,
        is_crowded: bool,
        reading: Callable[[Sequence], Reading] | None = None,
        num_coming: int = 0,
    ) -> Mapping[Sequence, int]:
        """Return how many drafts each request checks, at most `most` of it; see `DraftLengths.choose`."""
        if self.mode is GovernorMode.DISABLED:
            return most
        self.governor.explores = self.mode is GovernorMode.ENFORCE
        for sequence in [*self._compared]:
            self._compare(sequence)
        chosen = self.governor.choose(most, num_decodes, is_crowded=is_crowded, reading=reading, num_coming=num_coming)
        self._chosen_length = sum(chosen.values()) / num_decodes
        return chosen if self.mode is GovernorMode.ENFORCE else most

    def leave_unchecked(self, sequence: Sequence, drafts: list[int]) -> None:
        """Compare drafts with the tokens that come, unless others are being compared."""
        if self.is_free and self.mode is not GovernorMode.DISABLED:
            self._compared.setdefault(sequence, (len(sequence.token_ids), drafts))

    def observe_check(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Learn from a check that was read. `num_drafts`: one after another; of a tree its levels."""
        if self.mode is GovernorMode.DISABLED:
            return
        self._compared.pop(sequence, None)
        num_drafts = num_accepted if sequence.has_ended else num_drafts  # behind its end nothing was compared
        if num_drafts:
            self.governor.observe_drafts(sequence, num_drafts, num_accepted)
        if sequence.has_ended:
            self.forget(sequence)

    def observe_step(self, num_decodes: int, num_drafts: int, num_tokens: int, seconds: float) -> None:
        """Learn from a step that had decodes alone; `seconds`: of drafting and computing."""
        if self.mode is not GovernorMode.DISABLED:
            self.governor.observe_step(num_decodes, num_drafts, num_tokens, seconds)

    def observe_reading(self, seconds: float) -> None:
        """Learn that drafting has read prompts."""
        if self.mode is not GovernorMode.DISABLED:
            self.governor.observe_reading(seconds)

    def forget(self, sequence: Sequence) -> None:
        """The request has ended."""
        self._compared.pop(sequence, None)
        self.governor.forget(sequence)

    def report(self) -> GovernorReport | None:
        """Return what was measured since the start; None where the governor is disabled."""
        stats = self.governor.stats()
        if stats is None or self.mode is GovernorMode.DISABLED:
            return None
        return GovernorReport(
            self.mode.value,
            stats.length,
            self._chosen_length,
            tuple(one.tokens for one in stats.by_length),
            tuple(one.seconds for one in stats.by_length),
            stats.reading_seconds,
            stats.exploration_seconds,
            stats.flips,
        )

    def _compare(self, sequence: Sequence) -> None:
        known, drafts = self._compared[sequence]
        came = sequence.token_ids[known : known + len(drafts)]
        stood = next((place for place, one in enumerate(came) if one != drafts[place]), len(came))
        if stood < len(came) or len(came) == len(drafts):
            del self._compared[sequence]
            self.governor.observe_drafts(sequence, len(drafts), stood)


def decodes_alone(
    chunks: Seq[Chunk], *, are_heartbeats: bool = False, tree: DraftTree | None = None
) -> tuple[int, int] | None:
    """Return the decodes of a step and their drafts, of a tree their levels; None where it computes prompts too, or,
    unless they are all `are_heartbeats`, heartbeats."""
    num_drafts = 0
    for sequence, num_tokens in chunks:
        if num_tokens != 1 + len(sequence.draft_ids) or sequence.request.is_heartbeat is not are_heartbeats:
            return None
        num_drafts += len(sequence.draft_ids) if tree is None else tree.levels_of(len(sequence.draft_ids))
    return len(chunks), num_drafts


def crowd_of(max_num_seqs: int) -> int:
    """Return how many requests wait when speculation stops: half of those that the server lets wait."""
    return max(32, 2 * max_num_seqs)
