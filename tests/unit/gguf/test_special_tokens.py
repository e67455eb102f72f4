"""BOS and ends of a GGUF file where its metadata says little: by the rules of llama.cpp."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer

from millstream_runtime.gguf.special_tokens import end_tokens, ignored_ids
from millstream_runtime.gguf.tokenizer_files import tokenizer_config, tokenizer_json
from tests.unit.gguf.test_tokenizer_files import demo_metadata, piece_metadata

NAMES = {"<|endoftext|>": "<|begin_of_text|>", "<|im_start|>": "<|end_of_text|>", "<|im_end|>": "<|eot_id|>"}


def llama3(pre: str = "llama-bpe", kind: int = 3, **more: Any) -> dict[str, Any]:
    """Of April 2024: EOS is <|end_of_text|>, and neither `add_bos_token` nor `eot_token_id` is there."""
    metadata = demo_metadata(pre, bos_token_id=0, eos_token_id=1, **more)
    tokens = [NAMES.get(token, token) for token in metadata["tokenizer.ggml.tokens"]]
    kinds = [kind if token in NAMES.values() else 1 for token in tokens]
    return metadata | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}


def ids(metadata: dict[str, Any], text: str) -> list[int]:
    return list(FastTokenizer.from_str(json.dumps(tokenizer_json(metadata, "m.gguf"))).encode(text).ids)


@pytest.mark.parametrize(
    ("pre", "add_bos", "expected"),
    [
        *((pre, None, True) for pre in ("llama-bpe", "llama3", "llama-v3")),
        *((pre, None, False) for pre in ("gpt-2", "qwen2", "smollm", "deepseek-r1-qwen")),
        ("llama-bpe", False, False),
        ("gpt-2", True, True),
    ],
)
def test_a_bos_stands_before_prompts_of_the_pre_tokenizers_of_llama_3(
    pre: str, add_bos: bool | None, expected: bool
) -> None:
    assert (ids(llama3(pre, add_bos_token=add_bos), "Hello")[0] == 0) == expected


@pytest.mark.parametrize("kind", [3, 4, 1])
def test_an_end_of_a_turn_is_found_by_its_name_whatever_its_type_is(kind: int) -> None:
    metadata = llama3(kind=kind)
    assert end_tokens(metadata) == [1, 2]
    assert ids(metadata, "<|eot_id|>")[-1] == 2
    fast = FastTokenizer.from_str(json.dumps(tokenizer_json(metadata, "m.gguf")))
    assert fast.decode([2], skip_special_tokens=True) == ""


NO_IDS = {"bos_token_id": None, "eos_token_id": None, "unknown_token_id": None}
NONE = 0xFFFFFFFF  # how a converter spells that there is no token


@pytest.mark.parametrize(
    "more",
    [
        NO_IDS,
        {"bos_token_id": NONE, "eos_token_id": NONE, "unknown_token_id": NONE},
        {"bos_token_id": 99_999, "eos_token_id": -1, "eot_token_id": NONE, "unknown_token_id": 99_999},
    ],
)
def test_sentencepiece_has_the_ids_1_2_and_0_where_the_file_says_no_usable_ones(more: dict[str, Any]) -> None:
    """llama.cpp: `special_bos_id = 1, special_eos_id = 2, special_unk_id = 0`; a bad id is "using default id"."""
    metadata = piece_metadata(**more)
    assert end_tokens(metadata) == [2]
    assert ids(metadata, "hello")[0] == 1
    assert tokenizer_config(metadata, "m.gguf") == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert tokenizer_json(metadata, "m.gguf")["model"]["unk_token"] == "<unk>"
    named = [name for name, value in more.items() if value is not None]
    assert [sentence.split(" is ")[0] for sentence in ignored_ids(metadata)] == [
        f"tokenizer.ggml.{name}" for name in metadata_order(metadata, named)
    ]


def metadata_order(metadata: dict[str, Any], names: list[str]) -> list[str]:
    return [name for field in metadata if (name := field.removeprefix("tokenizer.ggml.")) in names]


def test_an_id_that_is_no_token_is_none_of_other_vocabularies_and_is_named() -> None:
    metadata = vocabulary("<|im_end|>", eos_token_id=NONE, eot_token_id=7, fim_pad_token_id=NONE)
    assert end_tokens(metadata) == [1]
    assert ignored_ids(metadata) == [
        "tokenizer.ggml.eos_token_id is 4294967295, and the vocabulary has 2 tokens: it is ignored, as in llama.cpp.",
        "tokenizer.ggml.eot_token_id is 7, and the vocabulary has 2 tokens: it is ignored, as in llama.cpp.",
        "tokenizer.ggml.fim_pad_token_id is 4294967295, and the vocabulary has 2 tokens: it is ignored, as in "
        "llama.cpp.",
    ]
    assert ids(llama3() | {"tokenizer.ggml.bos_token_id": NONE}, "Hello") == ids(llama3(add_bos_token=False), "Hello")


def vocabulary(*tokens: str, **more: Any) -> dict[str, Any]:
    fields = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", *tokens], **more}
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (vocabulary("<|im_end|>", "<|im_start|>"), [1]),
        (vocabulary("x", eos_token_id=1, eot_token_id=0), [0, 1]),
        (vocabulary("<end_of_turn>", "</s>", eom_token_id=0), [0, 1, 2]),
        (vocabulary("<|end|>", "<|return|>", "<|call|>"), [2, 3]),
        (vocabulary("<|end|>", "<|return|>"), [1, 2]),
        (vocabulary("<|end|>", "<|calls|>", "<|flush|>"), [2, 3]),
        (vocabulary("</s>", "<|tool_response>", eos_token_id=1), [2]),
        (vocabulary("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|fim_prefix|>"), [1, 2, 3]),
        (vocabulary("<|fim_pad|>", "x", fim_pad_token_id=2), [2]),
        (vocabulary("<\uff5cend\u2581of\u2581sentence\uff5c>"), [1]),
        (vocabulary("x"), []),
        ({}, []),
    ],
)
def test_the_ends_are_those_of_llama_cpp(metadata: dict[str, Any], expected: list[int]) -> None:
    assert end_tokens(metadata) == expected
