"""One change that makes the product wrong, and the tests that have to fail because of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
OPERATOR = "operator/millstream_operator"
RUNTIME = "runtime/millstream_runtime"
KERNELS = "kernels/millstream_kernels"
COMMAND_LINE = "cli/millstream"


@dataclass(frozen=True, slots=True)
class Mutation:
    """`old`, which stands once in `file`, becomes `new`."""

    trap: str  # what a reader of `new` could take for right
    file: str  # beneath the repository
    old: str
    new: str
    tests: tuple[str, ...]  # node IDs without parameters; one failure among them is enough

    @classmethod
    def of(cls, trap: str, file: str, old: str, new: str, *tests: str) -> Mutation:
        """`tests`: beneath tests/unit, or with their folder, as tests/security/..."""
        placed = (test if test.startswith("tests/") else f"tests/unit/{test}" for test in tests)
        return cls(trap, file, old, new, tuple(placed))

    def mutated(self) -> str:
        """The text of the file with the trap in it.

        Raises:
            ValueError: `old` stands there never or more than once.
        """
        text = (REPOSITORY / self.file).read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.file} has {self.old!r} {count} times; the mutation '{self.trap}' needs it once")
        return text.replace(self.old, self.new)

    def check(self) -> None:
        """Read the mutated file as what its name says it is, so that no test fails for a mistake in its syntax alone.

        A template of the chart is text until helm renders it.

        Raises:
            ValueError: `old` stands there never or more than once.
            SyntaxError, yaml.YAMLError, json.JSONDecodeError: the mutated file cannot be read.
        """
        text, path = self.mutated(), Path(self.file)
        if path.suffix == ".py":
            compile(text, self.file, "exec")
        elif path.suffix == ".json":
            json.loads(text)
        elif path.suffix == ".yaml" and "templates" not in path.parts:
            list(yaml.safe_load_all(text))

    def missing_tests(self) -> list[str]:
        """Those of `tests` that no file defines."""
        missing = []
        for node in self.tests:
            file, _, name = node.partition("::")
            path = REPOSITORY / file
            if not path.is_file() or f"def {name}(" not in path.read_text(encoding="utf-8"):
                missing.append(node)
        return missing
