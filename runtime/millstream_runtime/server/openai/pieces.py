"""Many small pieces that are joined at the end, of which the end costs little: they are joined in groups meanwhile.

Joining 64k pieces in one call, and freeing them, would block the event loop for milliseconds.
"""

from __future__ import annotations

from typing import AnyStr, Generic

GROUP_SIZE = 1024


class Pieces(Generic[AnyStr]):
    """Pieces in order, with a separator between any two."""

    def __init__(self, separator: AnyStr, group_size: int = GROUP_SIZE) -> None:
        """`group_size`: items of a group, or a few more."""
        self._separator: AnyStr = separator
        self._group_size = group_size
        self._groups: list[AnyStr] = []
        self._recent: list[AnyStr] = []
        self._num_recent_items = 0

    def append(self, piece: AnyStr, num_items: int = 1) -> None:
        """Add one at the end. `num_items`: how many are joined in it already."""
        self._recent.append(piece)
        self._num_recent_items += num_items
        if self._num_recent_items >= self._group_size:
            self._groups.append(self._separator.join(self._recent))
            self._recent, self._num_recent_items = [], 0

    @property
    def are_many(self) -> bool:
        """Whether they are more than one group."""
        return bool(self._groups)

    def joined(self) -> AnyStr:
        """All so far."""
        return self._separator.join(self.groups())

    def groups(self) -> list[AnyStr]:
        """All so far, in strings that a separator divides."""
        rest = [self._separator.join(self._recent)] if self._recent else []
        return self._groups + rest
