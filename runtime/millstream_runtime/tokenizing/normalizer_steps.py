"""One step of a normalizer, applied to a text only where what it makes is known to be within a limit.

The library normalizes a text as a whole and holds some 35 bytes per byte of it, so a step must not be tried.

- What replaces a pattern looks at the text around it, so a part of a text says nothing about the whole. The pattern is
  replaced by nothing, and by one letter: the difference is the number of matches, hence the size of the result.
- All other steps look at a character and those that combine with it. They are measured a chunk at a time.
"""

from __future__ import annotations

from typing import Any

from millstream_runtime.tokenizing.tokenizer_parts import Step, one_normalizer

CHUNK_CHARACTERS = 4096


class StepTooLong(Exception):
    """The step would make more than the limit."""


class NormalizerStep:
    """`step`: as the library writes it."""

    def __init__(self, step: Step) -> None:
        """Raises RustPanic: the library cannot make it."""
        self._normalizer = one_normalizer(step)
        self._content_bytes = utf8_bytes(step.get("content", ""))
        self._counters: tuple[Any, ...] = ()
        if step["type"] == "Replace":
            self._counters = tuple(one_normalizer({**step, "content": content}) for content in ("", "x"))
        self._adds_little = step["type"] in ("Prepend", "Strip")  # once, at the ends

    def applied(self, text: str, limit_bytes: int) -> str:
        """The normalized text.

        Raises:
            StepTooLong: it has more bytes of UTF-8 than `limit_bytes`.
            BaseException: a panic of the library.
        """
        if self._counters:
            without, with_letters = (utf8_bytes(counter.normalize_str(text)) for counter in self._counters)
            if without + (with_letters - without) * self._content_bytes > limit_bytes:
                raise StepTooLong
        elif not self._adds_little:
            self._measure_chunks(text, limit_bytes)
        normalized = str(self._normalizer.normalize_str(text))
        if self._adds_little and utf8_bytes(normalized) > limit_bytes:
            raise StepTooLong
        return normalized

    def _measure_chunks(self, text: str, limit_bytes: int) -> None:
        for start in range(0, len(text), CHUNK_CHARACTERS):
            limit_bytes -= utf8_bytes(self._normalizer.normalize_str(text[start : start + CHUNK_CHARACTERS]))
            if limit_bytes < 0:
                raise StepTooLong


def utf8_bytes(text: Any) -> int:
    """Bytes of a text in UTF-8, halves of surrogate pairs included."""
    return len(str(text).encode("utf-8", "surrogatepass"))
