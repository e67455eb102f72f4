"""A GGUF file's vocabulary as the files that Hugging Face has for it: tokenizer.json and tokenizer_config.json.

tokenizer.ggml.model    "gpt2": byte-level BPE, with merges · "llama": SentencePiece, merges follow from the scores
tokenizer.ggml.pre      how a text is cut before merges: llama.cpp has a name for each regular expression
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millstream_runtime.gguf.metadata_fields import MetadataFields

PREFIX = "tokenizer.ggml."
CONTROL, USER_DEFINED = 3, 4  # token types
SPACE = "\u2581"  # SentencePiece's
MAX_PIECE_CHARACTERS = 64  # of a piece whose merges are looked for
SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """`pattern`: what is one piece. `single_digits`: each digit is cut off first."""

    pattern: str
    single_digits: bool = False
    ignore_merges: bool = False  # a piece that is a token needs no merges
    normal_form: str | None = None


_LLAMA3 = PreTokenizer(rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}", ignore_merges=True)
_QWEN2 = PreTokenizer(rf"{_WORDS}|\p{{N}}|{_REST}", normal_form="NFC")
_PLAIN_GPT2 = PreTokenizer(_GPT2)
PRE_TOKENIZERS = {
    "gpt-2": _PLAIN_GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "smollm": PreTokenizer(_GPT2, single_digits=True),
}


def tokenizer_json(metadata: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The content of a tokenizer.json.

    Raises:
        RuntimeFailure: CheckpointInvalid or UnsupportedByRuntime, naming the field.
    """
    fields = MetadataFields(metadata, where, PREFIX)
    kind = fields.word("model")
    tokens = fields.items("tokens", str)
    if kind not in ("gpt2", "llama") or not tokens:
        raise fields.unsupported("model", kind or "missing", "gpt2, llama; or put a tokenizer.json next to the file")
    types = fields.items("token_type", int, len(tokens)) if "token_type" in fields else [1] * len(tokens)
    vocabulary: dict[str, int] = {}
    for number, token in enumerate(tokens):
        vocabulary.setdefault(token, number)
    parts = _byte_level(fields, vocabulary) if kind == "gpt2" else _sentence_piece(fields, tokens, vocabulary, types)
    added = [
        _added_token(number, token, is_special=kind_of == CONTROL)
        for number, (token, kind_of) in enumerate(zip(tokens, types, strict=True))
        if kind_of in (CONTROL, USER_DEFINED)
    ]
    around = _template(fields, tokens, adds_bos=fields.flag("add_bos_token", kind == "llama"))
    return {"version": "1.0", "added_tokens": added, "post_processor": around, **parts}


def tokenizer_config(metadata: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of a tokenizer_config.json that are read: chat template and special tokens."""
    fields = MetadataFields(metadata, where, PREFIX)
    tokens = fields.items("tokens", str)
    found: dict[str, Any] = {}
    for name, field in SPECIAL_TOKENS.items():
        if field in fields and tokens:
            found[name] = _token(fields, field, tokens)
    template = MetadataFields(metadata, where, "tokenizer.").word("chat_template")
    return found | ({"chat_template": template} if template else {})


def _token(fields: MetadataFields, field: str, tokens: Sequence[str]) -> str:
    number = fields.integer(field, least=0)
    if number >= len(tokens):
        raise fields.wrong(field, number, f"a token below {len(tokens)}")
    return tokens[number]


def _byte_level(fields: MetadataFields, vocabulary: Mapping[str, int]) -> dict[str, Any]:
    name = fields.word("pre", "default")
    if name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise fields.unsupported("pre", name, f"{known}; or put a tokenizer.json next to the file")
    pre = PRE_TOKENIZERS[name]
    steps: list[dict[str, Any]] = [{"type": "Digits", "individual_digits": True}] if pre.single_digits else []
    split = {"type": "Split", "pattern": {"Regex": pre.pattern}, "behavior": "Isolated", "invert": False}
    letters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    merges = [merge.split(" ") for merge in fields.items("merges", str)]
    for merge in merges:
        if len(merge) != 2 or any(part not in vocabulary for part in (*merge, "".join(merge))):
            raise fields.wrong("merges", " ".join(merge), "two tokens that make a third one")
    return {
        "normalizer": None if pre.normal_form is None else {"type": pre.normal_form},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, split, letters]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "ignore_merges": pre.ignore_merges,
            "vocab": vocabulary,
            "merges": merges,
        },
    }


def _sentence_piece(
    fields: MetadataFields, tokens: Sequence[str], vocabulary: Mapping[str, int], types: Sequence[int]
) -> dict[str, Any]:
    scores = fields.items("scores", float, len(tokens))
    adds_space = fields.flag("add_space_prefix", True)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    first = [{"type": "Prepend", "prepend": SPACE}] if adds_space else []
    last = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if adds_space else []
    whole = {token for token, kind in zip(tokens, types, strict=True) if kind in (CONTROL, USER_DEFINED)}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*first, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *last]},
        "model": {
            "type": "BPE",
            "unk_token": _token(fields, "unknown_token_id", tokens) if "unknown_token_id" in fields else None,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocabulary,
            "merges": _merges(dict(zip(tokens, scores, strict=True)), vocabulary, whole),
        },
    }


def _merges(scores: Mapping[str, float], vocabulary: Mapping[str, int], whole: set[str]) -> list[tuple[str, str]]:
    """SentencePiece joins the two neighbours that make the piece with the best score; all pairs that make a piece."""
    found: list[tuple[float, int, int, int, tuple[str, str]]] = []
    for piece, score in scores.items():
        if piece in whole or len(piece) > MAX_PIECE_CHARACTERS:
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary and left not in whole and right not in whole:
                found.append((-score, vocabulary[piece], vocabulary[left], vocabulary[right], (left, right)))
    return [pair for *_, pair in sorted(found)]


def _added_token(number: int, token: str, *, is_special: bool) -> dict[str, Any]:
    exact = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": number, "content": token, "special": is_special, **exact}


def _template(fields: MetadataFields, tokens: Sequence[str], *, adds_bos: bool) -> dict[str, Any]:
    """What stands around a prompt."""
    adds = (("bos_token_id", adds_bos), ("eos_token_id", fields.flag("add_eos_token", False)))
    ids = {field: fields.integer(field, least=0) for field, is_added in adds if is_added and field in fields}
    special = {_token(fields, field, tokens): number for field, number in ids.items()}
    before, after = (
        [{"SpecialToken": {"id": _token(fields, field, tokens), "type_id": 0}}] if field in ids else []
        for field in ("bos_token_id", "eos_token_id")
    )
    texts = [{"Sequence": {"id": name, "type_id": place}} for place, name in enumerate("AB")]
    return {
        "type": "TemplateProcessing",
        "single": [*before, texts[0], *after],
        "pair": [*before, *texts, *after],
        "special_tokens": {name: {"id": name, "ids": [number], "tokens": [name]} for name, number in special.items()},
    }
