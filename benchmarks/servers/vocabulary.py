"""A byte-level BPE tokenizer for models with random weights, whose tokens are made-up words.

A word is a space and one to three syllables of a consonant and a vowel (` ba`, ` bace`, ` bacedi`). The merges build it
in one way only, so the text of any sequence of words has the same token ids again, and servers that accept only text
get prompts of exact length. Text tells greedy answers apart as well as token ids would.
"""

from __future__ import annotations

import json
from itertools import islice, product
from pathlib import Path

SPACE = "\u0120"  # how byte-level BPE writes a space
END_OF_TEXT = "<|endoftext|>"
SYLLABLES = ["".join(pair) for pair in product("bcdfghjklmnpqrstvwxyz", "aeiou")]


def byte_alphabet() -> list[str]:
    """The character that stands for each byte (Radford et al. 2019, "bytes_to_unicode"), in the order of the bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}
    return [characters[byte] for byte in range(256)]


def make_vocabulary(vocab_size: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens by id, and merges by rank. The end of text is id 0; words follow the bytes and bare syllables.

    Raises:
        ValueError: too small for the bytes, or larger than the words that there are.
    """
    words = [SPACE + syllable for syllable in SYLLABLES]
    merges = [(syllable[0], syllable[1]) for syllable in SYLLABLES] + [(SPACE, syllable) for syllable in SYLLABLES]
    tokens = [END_OF_TEXT, *byte_alphabet(), *SYLLABLES, *words]
    if not len(tokens) <= vocab_size <= len(tokens) + 105**2 + 105**3:
        raise ValueError(f"no vocabulary of {vocab_size} tokens can be made")
    while (left := vocab_size - len(tokens)) > 0:
        longer = list(islice(product(words, SYLLABLES), left))
        merges += longer
        words = [word + syllable for word, syllable in longer]
        tokens += words
    return tokens, merges


def first_word_id() -> int:
    """From here on every token is a word that begins with a space."""
    return 1 + 256 + len(SYLLABLES)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    tokens, merges = make_vocabulary(vocab_size)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: id_ for id_, token in enumerate(tokens)},
        "merges": [list(pair) for pair in merges],
    }
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 0, "content": END_OF_TEXT, **flags}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }
    (folder / "tokenizer.json").write_text(json.dumps(document))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT, "bos_token": END_OF_TEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps({**about, "clean_up_tokenization_spaces": False}))
