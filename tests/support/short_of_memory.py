"""A model that finds no memory in some of its passes, as an allocator that is full makes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from millstream_runtime.engine.engine import Engine
from millstream_runtime.models.layers.attention import Attention


class ShortOfMemory:
    """Takes the place of an engine's model: some of its passes fail, after they have changed what they write first."""

    def __init__(self, engine: Engine, make_error: Callable[[], Exception]) -> None:
        self._model, self._make_error = engine._runner._forward.model, make_error
        self._forward, self._logits = self._model.forward, self._model.logits
        self.passes_left: int | None = None  # until one fails; None: none does
        self.num_failed = 0
        self._model.forward = self._fail_half_way  # type: ignore[method-assign, assignment]
        self._model.logits = self._fail_at_the_head  # type: ignore[method-assign]

    def give_back(self) -> None:
        """Let the model be as it was."""
        del self._model.forward, self._model.logits

    def _is_due(self) -> bool:
        if self.passes_left is None:
            return False
        self.passes_left -= 1
        if self.passes_left >= 0:
            return False
        self.passes_left = None
        self.num_failed += 1
        return True

    def _fail_half_way(self, token_ids: Tensor, positions: Tensor, attention: Attention, **others: Any) -> Tensor:
        if self._is_due():
            self._forward(token_ids, positions, attention, num_layers=1)
            raise self._make_error()
        return self._forward(token_ids, positions, attention, **others)

    def _fail_at_the_head(self, residual: Tensor) -> Tensor:
        if self._is_due():
            raise self._make_error()
        return self._logits(residual)
