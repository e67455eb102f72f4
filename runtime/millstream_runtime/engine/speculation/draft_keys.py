"""Which tokens of a sequence the draft model has computed. Pure bookkeeping, no torch.

The draft model's pool has the blocks of the target's pool, and a sequence has the same blocks in both. But the draft
model computes nothing of its own accord: a block that the target filled, or found in the prefix cache, may lack the
draft model's keys. So what this model's pool holds is recorded here, by what it computed itself:

    tokens     0 ................... num_computed ..................... known
    blocks     | hash | hash | hash |    partly   |  to be computed by   |
               `- recorded blocks --'             |  the draft model     |

- Of a sequence: how many of its tokens, from the first on, have keys in its blocks (`ReadTokens.num_computed`). It
  holds while the sequence keeps its blocks (`Sequence.num_releases`). Drafts are computed behind it, and count as soon
  as the tokens that came equal them: tokens are compared, so no report of what was accepted is needed.
- Of a block: the hash of the prefix that its keys belong to, the prefix cache's own. A new sequence with this prefix in
  this block has the keys, whoever computed them. A record goes before anything is written to its block, so it never
  says more than the truth, whatever the target's pool does with the block meanwhile.

Where a sliding window of the target has passed blocks, they may be another request's. So the draft model sees a
sequence from its first held block on (`ReadTokens.first`). Keys that it computes without all tokens that they would
depend on serve the sequence itself, and are not recorded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from millstream_runtime.engine.scheduling.sequence import BlockTable, Sequence


def draft_table(sequence: Sequence) -> Sequence | BlockTable:
    """The block table that the draft model uses: of the group of layers that reads furthest back."""
    return sequence.other_tables[-1] if sequence.other_tables else sequence


@dataclass(slots=True)
class ReadTokens:
    """How far the draft model has read one sequence; see above. Counts are tokens."""

    num_releases: int
    first: int = 0  # tokens before it are not seen; the start of a block
    num_computed: int = 0
    is_exact: bool = True  # whether its keys are those of the whole prefix
    num_recorded_blocks: int = 0  # first blocks of the table that need no further record
    drafted: list[int] = field(default_factory=list)  # computed behind `num_computed`, not known to be right


class DraftKeys:
    """What the draft model's pool holds, of all sequences and blocks."""

    def __init__(self, block_size_tokens: int, window_tokens: int | None = None) -> None:
        """`window_tokens`: how far back the draft model reads; None: to the start."""
        self._block_size_tokens, self._window_tokens = block_size_tokens, window_tokens
        self._progress: dict[Sequence, ReadTokens] = {}
        self._hash_of: dict[int, bytes] = {}  # by block: of the prefix whose keys it holds

    def progress(self, sequence: Sequence) -> ReadTokens:
        """Return how far the sequence has been read, by what is known now. At least its last token is not computed."""
        found = self._progress.get(sequence)
        if found is None or found.num_releases != sequence.num_releases:
            found = self._progress[sequence] = ReadTokens(sequence.num_releases)
        self._confirm(sequence, found)
        self._record(sequence, found)
        self._skip_passed(sequence, found)
        self._find(sequence, found)
        self._look_back(found)
        return found

    def write(self, sequence: Sequence, stop: int) -> None:
        """The draft model is about to write keys behind its computed tokens, up to token `stop`."""
        blocks, size = draft_table(sequence).block_table, self._block_size_tokens
        for block in blocks[self._progress[sequence].num_computed // size : -(-stop // size)]:
            self._hash_of.pop(block, None)

    def forget(self, sequence: Sequence) -> None:
        """The sequence is about to give up its blocks for good. What is computed stays, for those with its prefix."""
        found = self._progress.get(sequence)
        if found is not None and found.num_releases == sequence.num_releases and sequence.row is not None:
            self._confirm(sequence, found)
            self._record(sequence, found)
        self._progress.pop(sequence, None)

    def discard(self, sequence: Sequence) -> list[int]:
        """Its keys are damaged: drop all records of its blocks, and return them."""
        blocks = [*draft_table(sequence).held_blocks]
        for block in blocks:
            self._hash_of.pop(block, None)
        self._progress.pop(sequence, None)
        return blocks

    def _confirm(self, sequence: Sequence, found: ReadTokens) -> None:
        """Count the drafts that are known tokens by now as computed."""
        known = sequence.token_ids
        for drafted in found.drafted:
            if found.num_computed >= len(known) - 1 or known[found.num_computed] != drafted:
                break
            found.num_computed += 1
        found.drafted = []

    def _skip_passed(self, sequence: Sequence, found: ReadTokens) -> None:
        num_passed = draft_table(sequence).num_passed_blocks
        found.first = num_passed * self._block_size_tokens
        if found.num_computed < found.first:
            found.num_computed, found.num_recorded_blocks = found.first, num_passed
            found.is_exact = False

    def _find(self, sequence: Sequence, found: ReadTokens) -> None:
        """Count blocks that hold the keys of the sequence's prefix already."""
        blocks, hashes, size = draft_table(sequence).block_table, sequence.block_hashes, self._block_size_tokens
        start, offset = divmod(found.num_computed, size)
        most = min((len(sequence.token_ids) - 1) // size, len(hashes), len(blocks))
        index = start
        while not offset and index < most and self._hash_of.get(blocks[index]) == hashes[index]:
            index += 1
        if index > start:
            found.is_exact |= found.num_computed == found.first
            found.num_computed, found.num_recorded_blocks = index * size, index

    def _look_back(self, found: ReadTokens) -> None:
        """See whether all tokens are there that the next one attends to."""
        sees_all = self._window_tokens is None or found.first <= found.num_computed - self._window_tokens + 1
        if found.first and not sees_all:
            found.is_exact = False

    def _record(self, sequence: Sequence, found: ReadTokens) -> None:
        """Record full blocks that were computed."""
        blocks, hashes = draft_table(sequence).block_table, sequence.block_hashes
        stop = min(found.num_computed // self._block_size_tokens, len(hashes))
        if not found.is_exact or stop <= found.num_recorded_blocks:
            return
        for index in range(max(found.num_recorded_blocks, found.first // self._block_size_tokens), stop):
            self._hash_of[blocks[index]] = hashes[index]
        found.num_recorded_blocks = stop
