"""Tokenizer classes that decide how text becomes tokens, whatever tokenizer.json says, as in `transformers` 5.

    tokenizer.json       vocabulary and merges; what stands around a prompt (post_processor)
    the class            normalizer, pre-tokenizer, decoder and options of the model, by the table below
    tokenizer_config     add_prefix_space, legacy, unk_token

A class that is not in the table, or a model that is no BPE, follows tokenizer.json alone. A test compares each row with
the class of `transformers` 5.23.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from millstream_runtime.tokenizing.folder.files import JsonFile
from millstream_runtime.tokenizing.folder.token import wrong

SPACE = "\u2581"  # stands for a space in SentencePiece's vocabularies
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
QWEN2_WORDS = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN3_5_WORDS = (
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PARTS = ("normalizer", "pre_tokenizer", "decoder")
Step = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Steps as tokenizer.json spells them; None: there is none.

    `model`: options of the BPE model next to vocabulary and merges. `puts_bos`: whether the class itself decides that a
    BOS stands before a plain prompt, or that none does; None: the post_processor of tokenizer.json decides.
    `has_exact_special_tokens`: whether every special token loses its flags (`rstrip`, `special: false`).
    """

    normalizer: Step | None
    pre_tokenizer: Step
    decoder: Step
    model: Mapping[str, Any] = field(default_factory=dict)
    puts_bos: bool | None = None
    has_exact_special_tokens: bool = False


@dataclass(frozen=True, slots=True)
class ClassOptions:
    """Fields of tokenizer_config.json that a class reads. None: absent or null."""

    add_prefix_space: bool | None = None
    legacy: bool | None = None
    unk_token: str | None = None


def pipeline_of(class_name: str, settings: JsonFile, unk_token: str | None) -> Pipeline | None:
    """The pipeline that a class builds; None: tokenizer.json has it.

    Raises:
        RuntimeFailure: CheckpointInvalid, a field of tokenizer_config.json is neither a boolean nor null.
    """
    build = CLASS_PIPELINES.get(class_name)
    if build is None:
        return None
    add_prefix_space, legacy = (_flag(settings, name) for name in ("add_prefix_space", "legacy"))
    return build(ClassOptions(add_prefix_space, legacy, unk_token))


def rebuilt_tokenizer(content: bytes, pipeline: Pipeline, bos: tuple[str, int] | None) -> bytes:
    """The tokenizer.json of a class: without added tokens, which the class adds anew.

    `bos`: the token that stands before a prompt where the class puts it there, and its id.
    """
    document = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    of_file = msgspec.json.decode(document["model"], type=dict[str, msgspec.Raw])
    model: dict[str, Any] = {"type": "BPE", "fuse_unk": False, "byte_fallback": False, **pipeline.model}
    model |= {name: of_file[name] for name in ("vocab", "merges") if name in of_file}
    whole: dict[str, Any] = {**document, "added_tokens": [], "model": model}
    whole |= {name: getattr(pipeline, name) for name in PARTS}
    if pipeline.puts_bos is not None:
        whole["post_processor"] = _bos_before(*bos) if pipeline.puts_bos and bos is not None else None
    return msgspec.json.encode(whole)


def different_parts(content: bytes, pipeline: Pipeline) -> list[str]:
    """Names of the parts in which tokenizer.json says something else than the class."""
    document = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    of_file = {name: json.loads(bytes(document.get(name, msgspec.Raw(b"null")))) for name in PARTS}
    return [name for name in PARTS if _plain(of_file[name]) != _plain(getattr(pipeline, name))]


def _flag(settings: JsonFile, name: str) -> bool | None:
    value = settings.values.get(name)
    if value is not None and not isinstance(value, bool):
        raise wrong(settings.name, name, value, "true, false or null")
    return value


def _bos_before(content: str, number: int) -> Step:
    first, second = ({"Sequence": {"id": text, "type_id": place}} for place, text in enumerate("AB"))
    tokens = [{"SpecialToken": {"id": content, "type_id": place}} for place in range(2)]
    return {
        "type": "TemplateProcessing",
        "single": [tokens[0], first],
        "pair": [tokens[0], first, tokens[1], second],
        "special_tokens": {content: {"id": content, "ids": [number], "tokens": [content]}},
    }


def _plain(part: Any) -> Any:
    """A part without what changes no text: offsets, options of a byte-level decoder, a sequence around one step."""
    if not isinstance(part, dict):
        return part
    steps = part.get("normalizers") or part.get("pretokenizers") or part.get("decoders")
    if part.get("type") == "Sequence" and isinstance(steps, list):
        plain_steps = [_plain(step) for step in steps]
        return plain_steps[0] if len(plain_steps) == 1 else plain_steps
    return {name: value for name, value in part.items() if name != "trim_offsets"}


def _sequence(key: str, *steps: Step) -> Step:
    return {"type": "Sequence", key: list(steps)}


def _replace(pattern: str, content: str) -> Step:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def _byte_level(*, add_prefix_space: bool, use_regex: bool = True) -> Step:
    flags = {"add_prefix_space": add_prefix_space, "trim_offsets": True, "use_regex": use_regex}
    return {"type": "ByteLevel", **flags}


def _split(pattern: Mapping[str, str], behavior: str) -> Step:
    return {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": False}


NO_AFFIXES = {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
NFC: Step = {"type": "NFC"}
BYTES: Step = _byte_level(add_prefix_space=True)  # as a decoder, whose options have no effect
# Of tokens that spell bytes and spaces: pieces, bytes, one text.
PIECES: tuple[Step, ...] = (_replace(SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"})
WITHOUT_FIRST_SPACE: Step = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def _metaspace(prepend_scheme: str) -> Step:
    return {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": prepend_scheme, "split": False}


def _llama(options: ClassOptions) -> Pipeline:
    adds_space = options.add_prefix_space is not False
    scheme = ("always" if options.legacy else "first") if adds_space else "never"
    decoders = (*PIECES, WITHOUT_FIRST_SPACE) if adds_space else PIECES
    model = {"fuse_unk": True, "byte_fallback": True}
    return Pipeline(None, _metaspace(scheme), _sequence("decoders", *decoders), model)


def _code_llama(options: ClassOptions) -> Pipeline:
    scheme = "never" if options.add_prefix_space is False else "first"
    decoder = _sequence("decoders", *PIECES, WITHOUT_FIRST_SPACE)
    model = {"unk_token": options.unk_token, "fuse_unk": True, "byte_fallback": True}
    return Pipeline(None, _metaspace(scheme), decoder, model, puts_bos=True)


def _gemma(options: ClassOptions) -> Pipeline:
    words = _split({"String": " "}, "MergedWithPrevious")
    model = {"unk_token": options.unk_token, "fuse_unk": True, "byte_fallback": True}
    return Pipeline(_replace(" ", SPACE), words, _sequence("decoders", *PIECES), model)


def _gpt2(options: ClassOptions) -> Pipeline:
    return Pipeline(None, _byte_level(add_prefix_space=bool(options.add_prefix_space)), BYTES, NO_AFFIXES)


def _gpt_neox(options: ClassOptions) -> Pipeline:
    words = _byte_level(add_prefix_space=bool(options.add_prefix_space))
    return Pipeline(NFC, words, BYTES, NO_AFFIXES, puts_bos=False)


def _qwen(pattern: str, *, has_exact_special_tokens: bool) -> Callable[[ClassOptions], Pipeline]:
    def build(options: ClassOptions) -> Pipeline:
        letters = _byte_level(add_prefix_space=bool(options.add_prefix_space), use_regex=False)
        words = _sequence("pretokenizers", _split({"Regex": pattern}, "Isolated"), letters)
        return Pipeline(NFC, words, BYTES, NO_AFFIXES, has_exact_special_tokens=has_exact_special_tokens)

    return build


def _cohere(options: ClassOptions) -> Pipeline:
    letters = _byte_level(add_prefix_space=bool(options.add_prefix_space))
    words = _sequence("pretokenizers", {"type": "Digits", "individual_digits": True}, letters)
    return Pipeline(NFC, words, BYTES, NO_AFFIXES)


# By the class's name without the "Fast" at its end.
CLASS_PIPELINES: Mapping[str, Callable[[ClassOptions], Pipeline]] = {
    "CodeGenTokenizer": _gpt2,
    "CodeLlamaTokenizer": _code_llama,
    "CohereTokenizer": _cohere,
    "GPT2Tokenizer": _gpt2,
    "GPTNeoXTokenizer": _gpt_neox,
    "GemmaTokenizer": _gemma,
    "LlamaTokenizer": _llama,
    "Qwen2Tokenizer": _qwen(QWEN2_WORDS, has_exact_special_tokens=True),
    "Qwen3_5Tokenizer": _qwen(QWEN3_5_WORDS, has_exact_special_tokens=False),
}
