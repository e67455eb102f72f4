"""One change that makes code wrong, and the tests that have to notice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Mutation:
    """`old`, which stands once in `file`, becomes `new`."""

    trap: str  # what a reader of `new` could take for right
    file: str  # beneath the repository
    old: str
    new: str
    tests: tuple[str, ...]  # node IDs without parameters; one failure among them is enough

    def mutated(self) -> str:
        """The text of the file with the trap in it.

        Raises:
            ValueError: `old` stands there never or more than once.
        """
        text = (REPOSITORY / self.file).read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.file} has {self.old!r} {count} times; the mutation '{self.trap}' needs it once")
        return text.replace(self.old, self.new)

    def missing_tests(self) -> list[str]:
        """Those of `tests` that no file defines."""
        missing = []
        for node in self.tests:
            file, _, name = node.partition("::")
            path = REPOSITORY / file
            if not path.is_file() or f"def {name}(" not in path.read_text():
                missing.append(node)
        return missing
