"""Tokenizers that multiply what they are given: refused at load, or at the prompt that would make them; the published
kinds serve."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.gguf import tokenizer_files
from millstream_runtime.tokenizing import text_growth
from millstream_runtime.tokenizing.text_growth import TextTooLong
from millstream_runtime.tokenizing.tokenizer import Tokenizer
from tests.support.hostile_tokenizers import (
    BYTE_LEVEL,
    METASPACE,
    PROMPT,
    Part,
    precompiled,
    replace,
    replace_matches,
    sequence,
    template,
    tokenizer_json,
    write_model,
)
from tests.support.server_thread import ServerThread, serving

# 24 doublings make 16 million characters of one: too many, but not the end of the machine if they are ever made.
DOUBLINGS = 24
# Doubles `a` before a `#`, which neither the pattern nor the content shows to who looks for texts to probe with.
UNSEEN = sequence(*[replace_matches("a(?=a*#)", "aa")] * DOUBLINGS)
PREPEND = {"type": "Prepend", "prepend": "\u2581"}
SPACED_BYTES = {**BYTE_LEVEL, "add_prefix_space": True}
ADDED_TOKEN = {"single_word": False, "lstrip": False, "rstrip": False, "special": False}

HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "doublings": ({"normalizer": sequence(*[replace("a", "aa")] * DOUBLINGS)}, "16 times as many bytes of 'a'"),
    "doublings of what is not ASCII": (
        {"normalizer": sequence(*[replace("\u0416\u0416", "\u0416\u0416\u0416\u0416")] * DOUBLINGS)},
        "16 times as many bytes of",
    ),
    "doublings in sequences of sequences": (
        {"normalizer": sequence(sequence(*[replace("a", "aa")] * DOUBLINGS))},
        "16 times as many bytes of 'a'",
    ),
    "doublings of what another step makes": (
        {
            "normalizer": sequence(
                replace_matches("q{3}z", "\u0416"), *[replace_matches("[\u0416]", "\u0416\u0416")] * 24
            )
        },
        "16 times as many bytes of",
    ),
    "doublings of an added token, at load": (
        {
            "normalizer": sequence(*[replace("a", "aa")] * DOUBLINGS),
            "added_tokens": [{"id": 400, "content": "aaaa", "normalized": True, **ADDED_TOKEN}],
        },
        "16 times as many bytes of 'a'",
    ),
    "steps without a type, as of old": (
        {"normalizer": {"normalizers": [{"pattern": {"String": "a"}, "content": "aa"}] * DOUBLINGS}},
        "16 times as many bytes of 'a'",
    ),
    "one long replacement": ({"normalizer": replace("a", "x" * 1000)}, "can make 1000 bytes of one"),
    "one long replacement of a pattern": (
        {"normalizer": replace_matches("zq", "x" * 1000)},
        "can make 2001 bytes of one",
    ),
    "a long prefix": ({"normalizer": {"type": "Prepend", "prepend": "x" * 1000}}, "can make 1001 bytes of one"),
    "many prefixes": ({"normalizer": sequence(*[PREPEND] * 20)}, "16 times as many bytes of"),
    "a compiled map": ({"normalizer": precompiled({"a": "x" * 1000})}, "maps a character to 1000 bytes"),
    "a compiled map of a short character": (
        {"normalizer": precompiled({"\u00e9": "x" * 40})},
        "16 times as many bytes of '\u00e9'",
    ),
    "too many steps": ({"normalizer": sequence(*[{"type": "NFC"}] * 300)}, "more than 256 normalizers"),
    "bytes of bytes": (
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPACED_BYTES] * 20}},
        "its pre-tokenizer can make",
    ),
    "prefixes of pieces": (
        {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [{**METASPACE, "replacement": one, "split": False} for one in "\u2581\u2588" * 10],
            }
        },
        "its pre-tokenizer can make",
    ),
    "copies of the prompt": ({"post_processor": template(*[PROMPT] * 40)}, "its post-processor can make 40 times"),
    "special tokens around the prompt": (
        {
            "post_processor": template(
                {"SpecialToken": {"id": "x", "type_id": 0}},
                PROMPT,
                special_tokens={"x": {"id": "x", "ids": [1] * 5000, "tokens": ["x"] * 5000}},
            )
        },
        "adds 5000 tokens to each prompt",
    ),
    "doublings of the answer": (
        {"decoder": {"type": "Sequence", "decoders": [replace("a", "aa")] * DOUBLINGS}},
        "its decoder can make",
    ),
    "a token of megabytes": (
        {"added_tokens": [{"id": 400, "content": "a" * 20_000, "normalized": False, **ADDED_TOKEN}]},
        "20000 characters; at most",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_tokenizer_that_multiplies_is_refused_at_load_with_its_file(name: str, tmp_path: Path) -> None:
    parts, says = HOSTILE[name]
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_json(**parts))
    with pytest.raises(RuntimeFailure) as caught:
        Tokenizer.from_folder(tmp_path)
    assert caught.value.reason is FailureReason.CHECKPOINT_INVALID
    assert "tokenizer.json" in caught.value.message
    assert says in caught.value.message
    assert len(caught.value.message) < 600


@pytest.fixture(scope="module")
def unseen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    with serving(write_model(tmp_path_factory.mktemp("growth") / "m", normalizer=UNSEEN)) as server:
        yield server.wait_ready()


@pytest.mark.parametrize("route", ["completions", "chat", "tokenize"])
def test_a_prompt_that_would_fill_the_memory_is_refused_and_others_are_served(unseen: ServerThread, route: str) -> None:
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "completions": ("/v1/completions", {"prompt": "a#", "max_tokens": 1}),
        "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a#"}], "max_tokens": 1}),
        "tokenize": ("/tokenize", {"prompt": "a#"}),
    }
    path, body = bodies[route]
    answer = unseen.post(path, {"model": "tiny", **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "prompt_too_complex"
    assert "16 times as many bytes" in answer.json()["error"]["message"]
    plain = unseen.post("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 1})
    assert plain.status_code == 200


def test_a_text_that_grows_to_less_than_sixteen_times_is_bounded_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(tokenizer_json(normalizer={"type": "NFKC"}), None)
    text = "\ufdfa" * 1000
    assert len(tokenizer.encode(text)) == 33_000
    monkeypatch.setattr(text_growth, "MAX_NORMALIZED_BYTES", 33_000)
    assert len(tokenizer.encode(text)) == 33_000
    monkeypatch.setattr(text_growth, "MAX_NORMALIZED_BYTES", 32_999)
    with pytest.raises(TextTooLong):
        tokenizer.encode(text)
    assert len(tokenizer.encode("a" * 32_999)) == 32_999


# What the maps of published SentencePiece models do, for the characters that they lengthen the most.
NMT_NFKC = precompiled(
    {
        "\ufdfa": "\u0635\u0644\u0649 \u0627\u0644\u0644\u0647 \u0639\u0644\u064a\u0647 \u0648\u0633\u0644\u0645",
        "\ufb03": "ffi",
        "\u3300": "\u30a2\u30d1\u30fc\u30c8",
        "\u00a0": " ",
        "\t": " ",
        "\u00bd": "1\u20442",
    }
)
WORDS = "'s|'t| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"


def split(pattern: str) -> Part:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def pieces(*steps: Part) -> Part:
    return {"type": "Sequence", "pretokenizers": list(steps)}


BERT = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None}
LLAMA_DECODER: Part = {
    "type": "Sequence",
    "decoders": [
        replace("\u2581", " "),
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}
DIGITS = {"type": "Digits", "individual_digits": True}
PUBLISHED: dict[str, dict[str, Any]] = {
    "GPT-2, Llama 3": {"pre_tokenizer": pieces(split(WORDS), BYTE_LEVEL), "post_processor": BYTE_LEVEL},
    "Qwen": {"normalizer": {"type": "NFC"}, "pre_tokenizer": pieces(split(WORDS), BYTE_LEVEL)},
    "DeepSeek": {
        "normalizer": sequence(),
        "pre_tokenizer": pieces(split(r"\p{N}{1,3}"), split("[\u4e00-\u9fa5]+"), split(WORDS), BYTE_LEVEL),
    },
    "Falcon": {"pre_tokenizer": pieces({"type": "Punctuation", "behavior": "Contiguous"}, BYTE_LEVEL, DIGITS)},
    "Llama 2, Mistral, Phi 3": {
        "normalizer": sequence(PREPEND, replace(" ", "\u2581")),
        "pre_tokenizer": None,
        "decoder": LLAMA_DECODER,
        "post_processor": template(
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            PROMPT,
            special_tokens={"<s>": {"id": "<s>", "ids": [256], "tokens": ["<s>"]}},
        ),
    },
    "Gemma": {"normalizer": replace(" ", "\u2581"), "decoder": LLAMA_DECODER},
    "BERT": {
        "normalizer": {**BERT, "lowercase": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 102], "cls": ["[CLS]", 101]},
    },
    "XLM-R": {
        "normalizer": sequence(NMT_NFKC, replace_matches(" {2,}", "\u2581")),
        "pre_tokenizer": pieces({"type": "WhitespaceSplit"}, METASPACE),
        "decoder": METASPACE,
    },
    "T5": {
        "normalizer": sequence(NMT_NFKC, replace_matches(" {2,}", " ")),
        "pre_tokenizer": METASPACE,
        "decoder": METASPACE,
    },
    "XLNet, ALBERT": {
        "normalizer": sequence(
            *(replace("``", '"'), replace("''", '"'), {"type": "NFKD"}, {"type": "StripAccents"}),
            *({"type": "Lowercase"}, NMT_NFKC, replace_matches(" {2,}", " ")),
        ),
        "pre_tokenizer": pieces({"type": "WhitespaceSplit"}, METASPACE),
    },
    "CLIP": {
        "normalizer": sequence({"type": "NFC"}, replace_matches(r"\s+", " "), {"type": "Lowercase"}),
        "pre_tokenizer": pieces(split(WORDS), SPACED_BYTES),
        "post_processor": {
            "type": "RobertaProcessing",
            "sep": ["</s>", 2],
            "cls": ["<s>", 0],
            "trim_offsets": False,
            "add_prefix_space": False,
        },
    },
    "all of NFKC": {"normalizer": {"type": "NFKC"}},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_kinds_are_served_with_the_character_that_grows_most(name: str) -> None:
    tokenizer = Tokenizer(tokenizer_json(**PUBLISHED[name]), None)
    assert tokenizer.encode("hello \ufdfa")


@pytest.mark.parametrize("name", tokenizer_files.PRE_TOKENIZERS)
def test_the_tokenizers_of_gguf_files_are_served(name: str) -> None:
    letters = [*"helo", "he", "\u0120"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": letters,
        "tokenizer.ggml.merges": ["h e"],
    }
    content = tokenizer_files.tokenizer_json(metadata, "m.gguf")
    assert Tokenizer(tokenizer_json(**{key: content[key] for key in ("normalizer", "pre_tokenizer")}), None).encode("h")
