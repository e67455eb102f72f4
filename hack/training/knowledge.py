"""What the demo model knows: terms, and an answer to what, why and how for each of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

FOLDER = Path(__file__).parent / "knowledge"
FACETS = ("what", "why", "how")


@dataclass(frozen=True, slots=True)
class Fact:
    """One term. `names[0]` is its usual name, with the article that it carries inside a sentence."""

    topic: str
    names: tuple[str, ...]
    answers: dict[str, str]  # facet -> one to three sentences

    @property
    def term(self) -> str:
        return self.names[0]

    @property
    def first_sentence(self) -> str:
        return self.answers["what"].split(". ")[0].rstrip(".") + "."

    @property
    def paragraph(self) -> str:
        return " ".join(self.answers[facet] for facet in FACETS if facet in self.answers)


def load() -> list[Fact]:
    """Every fact, in the order of the files' names.

    Raises:
        ValueError: an entry lacks an answer to `what` or `why`, has an unknown field, or is there twice.
    """
    facts: list[Fact] = []
    seen: set[str] = set()
    for path in sorted(FOLDER.glob("*.yaml")):
        for entry in yaml.safe_load(path.read_text(encoding="utf-8")):
            names = (entry["term"], *entry.get("also", ()))
            unknown = set(entry) - {"term", "also", *FACETS}
            if unknown or not {"what", "why"} <= set(entry):
                raise ValueError(f"{path.name}: {names[0]!r} needs what and why, and knows no {sorted(unknown)}")
            if twice := seen & {name.lower() for name in names}:
                raise ValueError(f"{path.name}: {sorted(twice)} is described twice")
            seen |= {name.lower() for name in names}
            answers = {facet: entry[facet].strip() for facet in FACETS if facet in entry}
            facts.append(Fact(path.stem, names, answers))
    return facts
