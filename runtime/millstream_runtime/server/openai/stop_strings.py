"""Stop strings: cut the answer before the first one, even if it spans several tokens.

Text that may still become a stop string is held back, so that no part of one reaches the client:

    stop = ["\\nUser:"]
    push("Hello.\\n")  -> "Hello."     the newline may begin the stop string
    push("Us")        -> ""
    push("ually")     -> "\\nUsually"  it did not
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """State of one generation. After `found` is True every further push returns ""."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held_back = ""
        self.found = False

    def push(self, text: str) -> str:
        """Text that is safe to show."""
        if self.found or not self._stops:
            return "" if self.found else text
        text = self._held_back + text
        position = min((at for stop in self._stops if (at := text.find(stop)) >= 0), default=-1)
        if position >= 0:
            self.found, self._held_back = True, ""
            return text[:position]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held_back = text[len(text) - keep :]
        return text[: len(text) - keep]

    def would_find(self, text: str) -> bool:
        """Whether a stop string is complete if the answer goes on with `text`."""
        return not self.found and any(stop in self._held_back + text for stop in self._stops)

    def finish(self) -> str:
        """Text held back that did not become a stop string."""
        rest, self._held_back = self._held_back, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
