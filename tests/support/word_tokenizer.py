"""A tokenizer of invented words, for folders of which only the vocabulary counts."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel


def write_tokenizer(folder: Path, num_tokens: int, **other_ids: int) -> None:
    """Write `tokenizer.json` with the tokens w0, w1, ... `other_ids`: of tokens beyond them, or of some of them."""
    vocabulary = {f"w{number}": number for number in range(num_tokens)} | other_ids
    Tokenizer(WordLevel(vocabulary, unk_token="w0")).save(str(folder / "tokenizer.json"))
