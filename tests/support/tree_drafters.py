"""A drafter that fills trees with tokens of known answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from millstream_runtime.draft_tree import DraftTree
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.request import Request
from millstream_runtime.engine.scheduling.sequence import Sequence
from tests.support.drafters import OftenRight

# Three, then up to two, then one: each branch is as deep as another, and most are not the first of their level.
TREE_TEXT = "[(0,), (1,), (2,), (0, 0), (1, 0), (1, 1), (2, 0), (0, 0, 0), (1, 1, 0), (2, 0, 0)]"
TREE = DraftTree.parse(TREE_TEXT)


class OftenOnTheTree(OftenRight):
    """Puts the tokens that come on one branch, chosen at random for each check, down to some level; anything else on
    the others, now and then an id that no vocabulary has."""

    def __init__(
        self, answers: Mapping[tuple[int, ...], list[int]], vocab_size: int, seed: int = 0, tree: DraftTree = TREE
    ) -> None:
        super().__init__(answers, vocab_size, seed)
        self._guess, self._tree = self._on_the_tree, tree

    @classmethod
    def about(cls, requests: Iterable[Request], answers: Mapping[str, list[int]], vocab_size: int) -> OftenOnTheTree:
        return cls({tuple(one.prompt_token_ids): answers[one.request_id] for one in requests}, vocab_size)

    def _on_the_tree(self, sequence: Sequence, most: int) -> list[int]:
        rng = self._rng
        answer = self._answers.get(tuple(sequence.request.prompt_token_ids), [])
        coming = answer[sequence.num_generated_tokens :]
        branch = rng.choice(self._tree.nodes)
        right_levels = min(len(coming), rng.choice([len(branch), len(branch), rng.randint(0, len(branch))]))
        drafts = [
            coming[len(node) - 1]
            if len(node) <= right_levels and branch[: len(node)] == node
            else rng.randrange(self._vocab_size)
            for node in self._tree.nodes[:most]
        ]
        if rng.random() < 0.1:
            drafts[rng.randrange(len(drafts))] = rng.choice([-1, self._vocab_size])
        return drafts


def count_moved(engine: Engine) -> list[list[int]]:
    """Return a list that gets each accepted path whose keys do not lie where they belong."""
    moved: list[list[int]] = []
    keep = engine._runner.keep_drafts

    def kept(sequence: Sequence, nodes: list[int]) -> None:
        if nodes != list(range(len(nodes))):
            moved.append(nodes)
        keep(sequence, nodes)

    engine._runner.keep_drafts = kept  # type: ignore[method-assign, assignment]
    return moved
