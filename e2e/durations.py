"""What the suite measured: printed at its end, and kept as JSON. Nothing asserts a time tighter than its purpose."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Durations:
    """Seconds by name, in the order in which they were measured."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Record how long the block took, if it did not fail."""
        began = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - began, 2)

    def write(self, path: Path) -> None:
        """Keep them, with those of an earlier call that measured others: `make e2e` begins with an empty file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            earlier = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            earlier = {}
        path.write_text(json.dumps((earlier if isinstance(earlier, dict) else {}) | self.seconds, indent=2) + "\n")
