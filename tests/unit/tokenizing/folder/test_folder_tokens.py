"""Prompts, text and ends of folders that spell their tokens elsewhere: those of `transformers`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from millstream_runtime.tokenizing.folder.folder_text import read_folder_tokens
from millstream_runtime.tokenizing.tokenizer import Tokenizer
from tests.support.text_folders import (
    EXACT,
    FIRST_FREE,
    MARKER_TEMPLATE,
    MARKERS,
    NAMED,
    SPACE,
    TEMPLATE,
    Files,
    as_hub_cache,
    as_volume,
    sentencepiece,
    settings,
    stated,
    text_folder,
    token,
)

CHAT = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi <|turn|>"},
    {"role": "user", "content": "Bye"},
]
TEXT = "Hi <|turn|> there<|end_turn|> <|im_end|>x <s></s><extra>"
CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"


def without_end(document: dict[str, Any]) -> None:
    """The EOS is only in the vocabulary."""
    document["added_tokens"] = [one for one in document["added_tokens"] if one["content"] != "<|im_end|>"]
    document["model"]["vocab"] |= {"<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": 258}


def with_ordinary_end(document: dict[str, Any]) -> None:
    """The EOS is an added token that is not special."""
    for one in document["added_tokens"]:
        one["special"] = one["content"] != "<|im_end|>"


LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
GEMMA = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>"}
objects = {name: {**EXACT, "content": content} for name, content in NAMED.items()}
typed = {name: {**value, "__type": "AddedToken"} for name, value in objects.items()}
KINDS: dict[str, tuple[Files, Callable[[dict[str, Any]], None] | None]] = {
    "plain": ({CONFIG: settings(chat_template=TEMPLATE, **NAMED)}, None),
    # Special tokens (case 02) and its mirror images.
    "in the map": ({CONFIG: settings(chat_template=TEMPLATE), MAP: NAMED}, None),
    "in the map as objects": ({CONFIG: settings(chat_template=TEMPLATE), MAP: objects}, None),
    "in the settings as objects": ({CONFIG: settings(chat_template=TEMPLATE, **typed)}, None),
    "no settings": ({MAP: NAMED, "chat_template.jinja": TEMPLATE}, None),
    "the map wins": (
        {CONFIG: settings(chat_template=TEMPLATE, bos_token="<|im_start|>", eos_token="<|im_start|>"), MAP: NAMED},
        None,
    ),
    "the map has a null": (
        {CONFIG: settings(chat_template=TEMPLATE, **NAMED), MAP: {"bos_token": None}},
        None,
    ),
    "the map is not read": (
        {
            CONFIG: settings(chat_template=TEMPLATE, bos_token="<|im_end|>", added_tokens_decoder=stated()),
            MAP: NAMED,
        },
        None,
    ),
    "a null in the settings": ({CONFIG: settings(chat_template=TEMPLATE, **(NAMED | {"bos_token": None}))}, None),
    "a token of the model's own name": (
        {CONFIG: settings(chat_template="{{ turn_token }}{{ image_token }}x", turn_token="<|turn|>", **NAMED)},
        None,
    ),
    "own names in extra_special_tokens": (
        {
            CONFIG: settings(
                chat_template="{{ turn }}{{ bos_token }}x", extra_special_tokens={"turn": "<|turn|>"}, **NAMED
            )
        },
        None,
    ),
    # Added tokens (case 03) and its mirror images.
    "added_tokens_decoder": (
        {CONFIG: settings(chat_template=MARKER_TEMPLATE, added_tokens_decoder=stated(*MARKERS), **NAMED)},
        None,
    ),
    "added_tokens_decoder, not special": (
        {
            CONFIG: settings(
                chat_template=MARKER_TEMPLATE, added_tokens_decoder=stated(*MARKERS, special=False), **NAMED
            )
        },
        None,
    ),
    "added_tokens_decoder with spaces around": (
        {
            CONFIG: settings(
                chat_template=MARKER_TEMPLATE, added_tokens_decoder=stated(*MARKERS, lstrip=True, rstrip=True), **NAMED
            )
        },
        None,
    ),
    "added_tokens_decoder with other ids": (
        {
            CONFIG: settings(
                chat_template=MARKER_TEMPLATE,
                added_tokens_decoder=stated() | {"265": token("<|end_turn|>"), "269": token("<|turn|>")},
                **NAMED,
            )
        },
        None,
    ),
    "additional_special_tokens": (
        {CONFIG: settings(chat_template=MARKER_TEMPLATE, additional_special_tokens=MARKERS, **NAMED)},
        None,
    ),
    "additional_special_tokens as objects": (
        {
            CONFIG: settings(
                chat_template=MARKER_TEMPLATE,
                additional_special_tokens=[{**EXACT, "content": one, "__type": "AddedToken"} for one in MARKERS],
                **NAMED,
            )
        },
        None,
    ),
    "extra_special_tokens": (
        {
            CONFIG: settings(
                chat_template=MARKER_TEMPLATE,
                extra_special_tokens=MARKERS,
                additional_special_tokens=["<extra>"],
                **NAMED,
            )
        },
        None,
    ),
    "additional_special_tokens in the map": (
        {CONFIG: settings(chat_template=MARKER_TEMPLATE), MAP: {**NAMED, "additional_special_tokens": MARKERS}},
        None,
    ),
    "additional_special_tokens in both": (
        {
            CONFIG: settings(chat_template=MARKER_TEMPLATE, additional_special_tokens=MARKERS),
            MAP: {**NAMED, "additional_special_tokens": ["<extra>"]},
        },
        None,
    ),
    "extra_special_tokens in both": (
        {
            CONFIG: settings(chat_template=MARKER_TEMPLATE, extra_special_tokens=MARKERS),
            MAP: {**NAMED, "extra_special_tokens": ["<extra>", "<|turn|>"]},
        },
        None,
    ),
    "added_tokens.json": (
        {
            CONFIG: settings(chat_template=MARKER_TEMPLATE, **NAMED),
            ADDED: {"<|end_turn|>": FIRST_FREE + 1, "<|turn|>": FIRST_FREE},
        },
        None,
    ),
    "added_tokens.json, one special": (
        {
            CONFIG: settings(chat_template=MARKER_TEMPLATE, **(NAMED | {"eos_token": "<|end_turn|>"})),
            ADDED: {"<|end_turn|>": FIRST_FREE, "<|turn|>": FIRST_FREE + 1},
        },
        None,
    ),
    "added_tokens.json is not read": (
        {
            CONFIG: settings(chat_template=MARKER_TEMPLATE, added_tokens_decoder=stated(), **NAMED),
            ADDED: {"<|turn|>": FIRST_FREE},
        },
        None,
    ),
    "only in the vocabulary": ({CONFIG: settings(chat_template=TEMPLATE, **NAMED)}, without_end),
    "special by the settings alone": (
        {CONFIG: settings(chat_template=TEMPLATE, added_tokens_decoder=stated(), **NAMED)},
        with_ordinary_end,
    ),
    "special by its name alone": ({CONFIG: settings(chat_template=TEMPLATE, **NAMED)}, with_ordinary_end),
    # Tokens of the class (case 02).
    "of the class GPT2Tokenizer": ({CONFIG: {"tokenizer_class": "GPT2Tokenizer", "chat_template": TEMPLATE}}, None),
    "of the class Qwen2Tokenizer": (
        {CONFIG: {"tokenizer_class": "Qwen2TokenizerFast", "chat_template": TEMPLATE, "eos_token": "<|im_end|>"}},
        None,
    ),
    "LlamaTokenizer of bytes has none": (
        {CONFIG: {"tokenizer_class": "LlamaTokenizer", "chat_template": TEMPLATE, "eos_token": "<|im_end|>"}},
        None,
    ),
    # SentencePiece's pieces, with bytes for what has none.
    "as Llama 2": (
        {CONFIG: {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, **LLAMA}},
        sentencepiece(["<unk>", "<s>", "</s>"], bos="<s>", prefix=True),
    ),
    "of the class LlamaTokenizer": (
        {CONFIG: {"tokenizer_class": "LlamaTokenizer", "chat_template": TEMPLATE, **LLAMA}},
        sentencepiece(
            ["<unk>", "<s>", "</s>"],
            bos="<s>",
            prefix=True,
            normalizer=None,
            pre_tokenizer={"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False},
        ),
    ),
    "of the class GemmaTokenizer": (
        {CONFIG: {"tokenizer_class": "GemmaTokenizer", "chat_template": TEMPLATE, **GEMMA}},
        sentencepiece(
            ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"],
            bos="<bos>",
            prefix=False,
            normalizer={"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
            pre_tokenizer={
                "type": "Split",
                "pattern": {"String": " "},
                "behavior": "MergedWithPrevious",
                "invert": False,
            },
        ),
    ),
}
SOURCES: dict[str, Callable[[Path], Path]] = {"local": lambda folder: folder, "volume": as_volume, "hub": as_hub_cache}


@pytest.mark.matrix("kind")
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", KINDS)
def test_chats_prompts_and_text_are_those_of_transformers(tmp_path: Path, kind: str, source: str) -> None:
    files, change = KINDS[kind]
    folder = SOURCES[source](text_folder(tmp_path / "m", files, change))
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(CHAT, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert ours.encode_chat(CHAT) == expected
    ids = theirs(TEXT)["input_ids"]
    assert ours.encode(TEXT) == ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert {name: token for name, (token, _) in ours.choices.special_tokens.items()} == theirs.special_tokens_map


@pytest.mark.parametrize("kind", KINDS)
def test_the_ids_that_the_engine_reads_are_those_that_the_library_gives(tmp_path: Path, kind: str) -> None:
    """The engine finds the EOS without the library: its rule for ids of added tokens is written anew."""
    files, change = KINDS[kind]
    folder = text_folder(tmp_path / "m", files, change)
    theirs = AutoTokenizer.from_pretrained(folder)
    ends = Tokenizer.from_folder(folder).choices.end_sources
    of_tokenizer = [ids for file, ids in ends.items() if file not in ("config.json", "generation_config.json")]
    expected = [] if theirs.eos_token_id is None else [[theirs.eos_token_id]]
    assert [list(ids) for ids in of_tokenizer] == expected


def test_tokens_behind_the_models_vocabulary_are_left_out_and_named(tmp_path: Path) -> None:
    many = [f"<|{number}|>" for number in range(20)]  # 259 to 278, of 272 rows
    folder = text_folder(tmp_path / "m", {CONFIG: settings(additional_special_tokens=many, **NAMED)})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("<|0|><|12|>") == [259, 271]
    assert len(tokenizer.encode("<|13|>")) == len("<|13|>")
    (note,) = tokenizer.choices.notes
    assert "the added tokens <|13|>, <|14|>" in note


def test_what_was_chosen_is_said_with_its_file(tmp_path: Path) -> None:
    files = {CONFIG: settings(eos_token="<|im_end|>"), MAP: {"bos_token": "<|endoftext|>"}, ADDED: {"<|turn|>": 300}}
    chosen = Tokenizer.from_folder(text_folder(tmp_path / "m", files)).choices
    said = chosen.measured()
    assert said["special_tokens"] == {
        "bos_token": {"token": "<|endoftext|>", "from": MAP},
        "eos_token": {"token": "<|im_end|>", "from": CONFIG},
    }
    assert said["added_tokens"] == {"tokenizer.json": 3, ADDED: 1}
    assert said["detokenizer"] == "byte-level"
    assert said["end_tokens"]["ids"] == [258]
    (note,) = chosen.notes
    assert "<|turn|> has the id 259 and not 300" in note
    assert "eos_token=<|im_end|>(tokenizer_config.json)" in chosen.log_fields()["special_tokens"]


@pytest.mark.parametrize("in_settings", [{}, {"additional_special_tokens": ["<extra>"]}], ids=["alone", "both"])
def test_a_token_of_added_tokens_json_that_the_map_lists_is_no_text(tmp_path: Path, in_settings: Files) -> None:
    """As in transformers 4, which such folders were made with."""
    turn, end_turn = MARKERS
    files = {
        CONFIG: settings(**NAMED, **in_settings),
        MAP: {"additional_special_tokens": [turn, {"content": end_turn, **EXACT}]},
        ADDED: {turn: FIRST_FREE, end_turn: FIRST_FREE + 1, "<|word|>": FIRST_FREE + 2},
    }
    tokenizer = Tokenizer.from_folder(text_folder(tmp_path / "m", files))
    ids = tokenizer.encode(f"{turn}Hi<|word|>{end_turn}")
    assert (ids[0], ids[-1]) == (FIRST_FREE, FIRST_FREE + 1)
    detokenizer = tokenizer.detokenizer()
    assert "".join(map(detokenizer.push, ids)) + detokenizer.finish() == tokenizer.decode(ids) == "Hi<|word|>"


def test_a_folder_without_further_tokens_adds_none(tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "m", {})
    assert [one.content for one in read_folder_tokens(folder).added] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def test_a_token_that_two_files_mark_differently_streams_as_it_decodes(tmp_path: Path) -> None:
    """tokenizer.json says that <|im_start|> is special, tokenizer_config.json that it is not."""
    ordinary = {"257": token("<|im_start|>", special=False)}
    folder = text_folder(
        tmp_path / "m", {CONFIG: settings(chat_template=TEMPLATE, added_tokens_decoder=ordinary, **NAMED)}
    )
    tokenizer, expected = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    detokenizer, ids = tokenizer.detokenizer(), [257, *expected("Hi", add_special_tokens=False)["input_ids"], 257]
    text = "".join(map(detokenizer.push, ids)) + detokenizer.finish()
    assert text == tokenizer.decode(ids) == expected.decode(ids, skip_special_tokens=True)
