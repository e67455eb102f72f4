"""Drafts from Medusa heads (Cai et al. 2024, arXiv 2401.10774): each head guesses one token, from one hidden state.

    tokens of a sequence    ... t(n-2)  t(n-1)              t(n-1) is known, and not computed yet
    hidden state            state(n-2)                      the last that the target has left in its pool
    drafts                                  t(n)  t(n+1)    of head 0, of head 1, ...

All heads read the same state, so no head knows what another drafts, and there is nothing to catch up with. A tree takes
several tokens of a head, by rank (`draft_tree`): those of head 1 are the same behind each token of head 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import torch

from millstream_runtime.draft_tree import DraftTree
from millstream_runtime.engine.device_policy import DevicePolicy
from millstream_runtime.engine.medusa.medusa_shard import MedusaForward
from millstream_runtime.engine.scheduling.sequence import Sequence
from millstream_runtime.engine.speculation.draft_keys import draft_table
from millstream_runtime.engine.speculation.skip import Skip
from millstream_runtime.logs import log


class MedusaDrafter:
    """A `Drafter`."""

    def __init__(
        self, forward: MedusaForward, policy: DevicePolicy, block_size_tokens: int, tree: DraftTree | None = None
    ) -> None:
        """`tree`: by default the most probable token of each head."""
        self._forward, self._policy, self._block_size_tokens = forward, policy, block_size_tokens
        self._tree = tree or DraftTree.chain(forward.heads.num_heads)
        self._refused: set[Sequence] = set()

    def propose(self, wanted: Mapping[Sequence, int]) -> Mapping[Sequence, Seq[int] | Skip]:
        """See `Drafter.propose`."""
        answer: dict[Sequence, Seq[int] | Skip] = {}
        ready: list[Sequence] = []
        for sequence in wanted:
            if sequence in self._refused:
                answer[sequence] = Skip.DRAFT_NOT_FINITE
            elif len(sequence.token_ids) < 2:  # no state is before its first token
                answer[sequence] = Skip.NO_PROPOSAL
            else:
                ready.append(sequence)
        # Those that want the most first: each head computes the rows that want its token.
        ready.sort(key=lambda one: -wanted[one])
        with torch.inference_mode():
            answer |= self._drafts(ready, [min(wanted[one], len(self._tree.nodes)) for one in ready])
        return answer

    def forget(self, sequence: Sequence) -> None:
        """See `Drafter.forget`."""
        self._refused.discard(sequence)

    def _drafts(self, ready: list[Sequence], most: list[int]) -> dict[Sequence, Seq[int] | Skip]:
        """`most`: drafts of each, descending."""
        if not ready:
            return {}
        self._policy.before_compute(len(ready))
        states = self._forward.target_states([self._slot(one) for one in ready])
        ranked: list[list[list[int]]] = [[] for _ in ready]  # by request and level
        nodes = self._tree.nodes
        for level in range(len(nodes[most[0] - 1])):
            num_rows = sum(len(nodes[count - 1]) > level for count in most)
            count = 1 + max(node[-1] for node in nodes[: most[0]] if len(node) == level + 1)
            for row, tokens in enumerate(self._forward.tokens(level, states, num_rows, count)):
                ranked[row].append(tokens)
        return {
            one: self._checked(one, [found[len(node) - 1][node[-1]] for node in nodes[:count]])
            for one, found, count in zip(ready, ranked, most, strict=True)
        }

    def _checked(self, sequence: Sequence, found: list[int]) -> Seq[int] | Skip:
        if all(token_id >= 0 for token_id in found):
            return found
        self._refused.add(sequence)
        log.warning("draft_not_finite", request_id=sequence.request.request_id)
        return Skip.DRAFT_NOT_FINITE

    def _slot(self, sequence: Sequence) -> int:
        """Where the pool keeps the state of the last token that is computed."""
        token, size = len(sequence.token_ids) - 2, self._block_size_tokens
        return draft_table(sequence).block_table[token // size] * size + token % size
