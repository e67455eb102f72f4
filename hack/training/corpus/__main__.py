"""`python -m hack.training.corpus`: what the training text holds, by source and slice. A minute, and no training."""

from __future__ import annotations

from collections import Counter

from hack.training.corpus.documents import SLICES, read_corpus
from hack.training.corpus.sources import SOURCES


def main() -> None:
    corpus = read_corpus()
    print(f"sha256 {corpus.sha256}")
    for title, documents in (("training", corpus.training), ("held out", corpus.held_out)):
        print(f"{title:24}" + "".join(f"{name + ', characters':>20}{'documents':>12}" for name in SLICES))
        characters, counts = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for document in documents:
            characters[document.source, document.slice] += document.characters
            counts[document.source, document.slice] += 1
        for source in SOURCES:
            cells = [(characters[source.name, name], counts[source.name, name]) for name in SLICES]
            print(f"{source.name:24}" + "".join(f"{size:20,}{count:12,}" for size, count in cells))


if __name__ == "__main__":
    main()
