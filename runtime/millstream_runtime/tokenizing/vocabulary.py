"""Whether two models speak of the same tokens: a draft model's ids must mean what the target's do."""

from __future__ import annotations

from pathlib import Path

from millstream_runtime.errors import RuntimeFailure
from millstream_runtime.tokenizing.tokenizer import Tokenizer


def vocabulary_of(folder: Path) -> dict[str, int] | None:
    """Return the ids of all tokens of a model folder, added ones included; None where it has no usable tokenizer."""
    try:
        return Tokenizer.from_folder(folder).vocabulary()
    except RuntimeFailure:
        return None


def difference(target: dict[str, int], draft: dict[str, int]) -> str | None:
    """Return the first difference: `token 'x' has the id 5 in the target and 7 in the draft model`; None: equal."""
    different = [token for token in target.keys() | draft.keys() if target.get(token) != draft.get(token)]
    if not different:
        return None
    token = min(different, key=lambda one: (target.get(one, len(target)), one))
    return f"token {token!r:.60} {_has(target, token)} in the target and {_has(draft, token)} in the draft model"


def _has(vocabulary: dict[str, int], token: str) -> str:
    return f"has the id {vocabulary[token]}" if token in vocabulary else "is missing"
