"""A GGUF file's vocabulary as the files that Hugging Face has for it: tokenizer.json and tokenizer_config.json.

tokenizer.ggml.model    "gpt2": byte-level BPE, with merges · "llama": SentencePiece, merges follow from the scores
tokenizer.ggml.pre      how a text is cut before merges: llama.cpp has a name for each regular expression
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millstream_runtime.gguf.metadata_fields import MetadataFields
from millstream_runtime.gguf.special_tokens import PREFIX, adds_bos, named_ends, token_id

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
    types = list(fields.items("token_type", int, len(tokens))) if "token_type" in fields else [1] * len(tokens)
    for number in named_ends(metadata).values():
        types[number] = CONTROL  # llama.cpp does so, too: some files call them ordinary text
    vocabulary: dict[str, int] = {}
    for number, token in enumerate(tokens):
        vocabulary.setdefault(token, number)
    if kind == "gpt2":
        parts = _byte_level(fields, vocabulary)
    else:
        parts = _sentence_piece(fields, tokens, vocabulary, types, _id(fields, metadata, "unknown_token_id"))
    added = [
        _added_token(number, token, is_special=kind_of == CONTROL)
        for number, (token, kind_of) in enumerate(zip(tokens, types, strict=True))
        if kind_of in (CONTROL, USER_DEFINED)
    ]
    before = _id(fields, metadata, "bos_token_id") if adds_bos(fields) else None
    after = _id(fields, metadata, "eos_token_id") if fields.flag("add_eos_token", False) else None
    around = _template(tokens, before, after)
    return {"version": "1.0", "added_tokens": added, "post_processor": around, **parts}


def tokenizer_config(metadata: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of a tokenizer_config.json that are read: chat template and special tokens."""
    fields = MetadataFields(metadata, where, PREFIX)
    tokens = fields.items("tokens", str)
    found: dict[str, Any] = {}
    for name, field in SPECIAL_TOKENS.items():
        number = _id(fields, metadata, field)
        if number is not None and tokens:
            found[name] = tokens[number]
    template = MetadataFields(metadata, where, "tokenizer.").word("chat_template")
    return found | ({"chat_template": template} if template else {})


def _id(fields: MetadataFields, metadata: Mapping[str, Any], field: str) -> int | None:
    """`token_id`, where the field is an integer or absent.

    Raises:
        RuntimeFailure: it is something else.
    """
    if field in fields and type(metadata[f"{PREFIX}{field}"]) is not int:
        raise fields.wrong(field, metadata[f"{PREFIX}{field}"], "a token's id")
    return token_id(metadata, field)


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
    fields: MetadataFields,
    tokens: Sequence[str],
    vocabulary: Mapping[str, int],
    types: Sequence[int],
    unknown: int | None,
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
            "unk_token": None if unknown is None else tokens[unknown],
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


def _template(tokens: Sequence[str], before: int | None, after: int | None) -> dict[str, Any]:
    """What stands around a prompt. `before`, `after`: ids of tokens."""
    numbers = [number for number in (before, after) if number is not None]
    first, last = (
        [] if number is None else [{"SpecialToken": {"id": tokens[number], "type_id": 0}}] for number in (before, after)
    )
    texts = [{"Sequence": {"id": name, "type_id": place}} for place, name in enumerate("AB")]
    return {
        "type": "TemplateProcessing",
        "single": [*first, texts[0], *last],
        "pair": [*first, *texts, *last],
        "special_tokens": {
            tokens[number]: {"id": tokens[number], "ids": [number], "tokens": [tokens[number]]} for number in numbers
        },
    }
