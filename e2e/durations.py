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
        """Keep them."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.seconds, indent=2) + "\n")
