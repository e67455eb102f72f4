"""Classes that build normalizer, pre-tokenizer and decoder themselves: ids and text are those of `transformers` 5."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoTokenizer, TokenizersBackend
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from millstream_runtime.errors import RuntimeFailure
from millstream_runtime.tokenizing.folder.class_pipelines import CLASS_PIPELINES
from millstream_runtime.tokenizing.folder.folder_text import read_folder_tokens
from millstream_runtime.tokenizing.folder.tokenizer_classes import CLASS_DEFAULTS
from millstream_runtime.tokenizing.tokenizer import Tokenizer
from tests.support.text_folders import SPACE, TEMPLATE, Files, sentencepiece, stated, text_folder, token

CONFIG, MAP = "tokenizer_config.json", "special_tokens_map.json"
CHAT = [
    {"role": "user", "content": "Hello  there"},
    {"role": "assistant", "content": " Hi"},
    {"role": "user", "content": "Bye"},
]
LLAMA_TOKENS, GEMMA_TOKENS = ["<unk>", "<s>", "</s>"], ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
BYTE_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
OWN = {str(number): token(content) for number, content in enumerate(LLAMA_TOKENS)}
WORDS = [
    "Hi",
    "el",
    "Hello",
    " ",
    "  ",
    "\n",
    "\t",
    "é",
    "😀",
    "1",
    "23",
    ",",
    ".",
    "don't",
    "▁",
    "世界",
    "x",
    " the",
    "HI",
]
Change = Callable[[dict[str, Any]], None]


def pieces(*, prefix: bool = True, **parts: Any) -> Change:
    return sentencepiece(LLAMA_TOKENS, bos="<s>", prefix=prefix, **parts)


def gemma_pieces(*, prefix: bool = False) -> Change:
    return sentencepiece(GEMMA_TOKENS, bos="<bos>", prefix=prefix)


def with_prefix_space(document: dict[str, Any]) -> None:
    document["pre_tokenizer"]["add_prefix_space"] = True


def with_more_tokens(document: dict[str, Any]) -> None:
    document["added_tokens"].append({"id": 259, **token("<|turn|>")})


def of_class(name: str, **more: Any) -> Files:
    return {CONFIG: {"tokenizer_class": name, "chat_template": TEMPLATE, **more}}


# name: model_type, files, change of tokenizer.json
KINDS: dict[str, tuple[str, Files, Change | None]] = {
    "Llama 2, legacy absent": ("llama", of_class("LlamaTokenizer", **LLAMA), pieces()),
    "Llama 2, legacy false": ("llama", of_class("LlamaTokenizer", legacy=False, **LLAMA), pieces()),
    "Llama 2, legacy true": ("llama", of_class("LlamaTokenizerFast", legacy=True, **LLAMA), pieces()),
    "Llama 2, legacy null": ("llama", of_class("LlamaTokenizer", legacy=None, **LLAMA), pieces()),
    "TinyLlama": ("llama", of_class("LlamaTokenizer", legacy=False, added_tokens_decoder=OWN, **LLAMA), pieces()),
    "Code Llama": (
        "llama",
        of_class("CodeLlamaTokenizer", legacy=None, fill_token="<FILL_ME>", added_tokens_decoder=OWN, **LLAMA),
        pieces(),
    ),
    "Code Llama without a BOS in tokenizer.json": (
        "llama",
        of_class("CodeLlamaTokenizer", add_bos_token=False, **LLAMA),
        pieces(post_processor=None),
    ),
    "Code Llama with other names": (
        "llama",
        of_class("CodeLlamaTokenizer", prefix_token="<|turn|>", middle_token=None, **LLAMA),
        pieces(),
    ),
    "Yi": ("llama", of_class("LlamaTokenizer", legacy=True, add_bos_token=False, **LLAMA), pieces(prefix=False)),
    "Yi without a prefix": (
        "llama",
        of_class("LlamaTokenizerFast", legacy=True, add_prefix_space=False, **LLAMA),
        pieces(prefix=False),
    ),
    "LlamaTokenizer, the file has none": (
        "llama",
        of_class("LlamaTokenizer", add_eos_token=True, **LLAMA),
        pieces(post_processor=None),
    ),
    "Mistral v0.1": ("mistral", of_class("LlamaTokenizer", legacy=True, added_tokens_decoder=OWN, **LLAMA), pieces()),
    "Gemma": ("gemma2", of_class("GemmaTokenizer"), gemma_pieces()),
    "Gemma, the file has a prefix": (
        "gemma2",
        of_class("GemmaTokenizerFast", unk_token="<unk>"),
        gemma_pieces(prefix=True),
    ),
    "Qwen2Tokenizer": ("qwen2", of_class("Qwen2Tokenizer", eos_token="<|im_end|>"), None),
    "Qwen2Tokenizer with a prefix": (
        "qwen2",
        of_class("Qwen2Tokenizer", eos_token="<|im_end|>", add_prefix_space=True),
        None,
    ),
    "Qwen2Tokenizer, the settings have less": (
        "qwen2",
        of_class("Qwen2Tokenizer", eos_token="<|im_end|>", added_tokens_decoder=stated()),
        with_more_tokens,
    ),
    "Qwen2Tokenizer, the settings have none": (
        "qwen3_moe",
        of_class("Qwen2Tokenizer", bos_token="<|im_end|>", added_tokens_decoder={}),
        None,
    ),
    "Qwen2Tokenizer takes no flags of special tokens": (
        "qwen2",
        of_class(
            "Qwen2Tokenizer",
            eos_token="<|im_end|>",
            additional_special_tokens=["<|turn|>", "<extra>"],
            added_tokens_decoder=stated("<|turn|>", rstrip=True) | {"260": token("<extra>", special=False)},
        ),
        None,
    ),
    "GPT2Tokenizer": ("llama", of_class("GPT2Tokenizer", eos_token="<|im_end|>"), None),
    "GPT2Tokenizer with a prefix": (
        "llama",
        of_class("GPT2Tokenizer", eos_token="<|im_end|>", add_prefix_space=True),
        None,
    ),
    "GPT2Tokenizer, the file has a prefix": ("llama", of_class("GPT2Tokenizer"), with_prefix_space),
    "GPT2Tokenizer, a token that is not special": (
        "llama",
        of_class("GPT2Tokenizer", added_tokens_decoder=stated() | {"257": token("<|im_start|>", special=False)}),
        None,
    ),
    "GPTNeoXTokenizer": ("llama", of_class("GPTNeoXTokenizer", add_prefix_space=True), None),
    "a generic class takes no prefix": (
        "llama",
        of_class("PreTrainedTokenizerFast", eos_token="<|im_end|>", add_prefix_space=True),
        None,
    ),
    "model_specific_special_tokens": (
        "llama",
        of_class("TokenizersBackend", model_specific_special_tokens={"image_token": "<|turn|>"}),
        None,
    ),
    "model_specific_special_tokens and a field": (
        "llama",
        of_class("TokenizersBackend", model_specific_special_tokens={"a_token": "<|turn|>"}, b_token="<extra>"),
        None,
    ),
}


def write(folder: Path, kind: str) -> Path:
    model_type, files, change = KINDS[kind]
    text_folder(folder, files, change)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": model_type, "vocab_size": 400}))
    return folder


def random_texts(number: int) -> list[str]:
    draws = random.Random(20)
    words = [*WORDS, *LLAMA_TOKENS, *GEMMA_TOKENS, *BYTE_TOKENS, "<|turn|>", "<extra>", f"{SPACE}<MID>"]
    return ["".join(draws.choices(words, k=draws.randrange(1, 12))) for _ in range(number)]


@pytest.mark.matrix("kind")
@pytest.mark.parametrize("number", [100, 500])
@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_text_of_random_texts_are_those_of_transformers(tmp_path: Path, kind: str, number: int) -> None:
    folder = write(tmp_path / "m", kind)
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    assert {name: said for name, (said, _) in ours.choices.special_tokens.items()} == theirs.special_tokens_map
    chat = theirs.apply_chat_template(CHAT, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert ours.encode_chat(CHAT) == chat
    for text in random_texts(number):
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids, text
        plain_ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, add_special_tokens=False) == plain_ids, text
        expected = theirs.decode(plain_ids, skip_special_tokens=True)
        assert ours.decode(plain_ids) == expected, text
        detokenizer = ours.detokenizer()
        assert "".join(map(detokenizer.push, plain_ids)) + detokenizer.finish() == expected, text


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_that_the_engine_reads_is_that_of_transformers(tmp_path: Path, kind: str) -> None:
    folder = write(tmp_path / "m", kind)
    theirs = AutoTokenizer.from_pretrained(folder)
    ends = Tokenizer.from_folder(folder).choices.end_sources
    of_tokenizer = [list(ids) for file, ids in ends.items() if file != "config.json"]
    assert of_tokenizer == ([] if theirs.eos_token_id is None else [[theirs.eos_token_id]])


OPTIONS = [{}, *({name: value} for name in ("add_prefix_space", "legacy") for value in (True, False))]


@pytest.mark.parametrize("name", CLASS_PIPELINES)
def test_a_class_builds_the_pipeline_that_it_builds_in_transformers(tmp_path: Path, name: str) -> None:
    """Compared as the library writes both, so that steps which no text of another test meets are compared, too."""
    for number, options in enumerate(OPTIONS):
        spelled = gemma_pieces() if name == "GemmaTokenizer" else pieces()
        folder = text_folder(tmp_path / str(number), of_class(name, **options), spelled)
        theirs = json.loads(tokenizer_class_from_name(name).from_pretrained(folder).backend_tokenizer.to_str())
        ours = json.loads(FastTokenizer.from_buffer(read_folder_tokens(folder).content).to_str())
        for part in ("normalizer", "pre_tokenizer", "model"):
            assert ours[part] == theirs[part], (part, options)
        if theirs["decoder"]["type"] == "ByteLevel":  # whose options have no effect
            assert ours["decoder"]["type"] == "ByteLevel"
        else:
            assert ours["decoder"] == theirs["decoder"], options


def test_every_class_with_tokens_builds_its_pipeline_in_transformers() -> None:
    """So the log says of each one that is not in the table that `transformers` would build another tokenizer."""
    classes = {
        name: tokenizer_class_from_name(name) or tokenizer_class_from_name(f"{name}Fast") for name in CLASS_DEFAULTS
    }
    for name, made in classes.items():
        assert issubclass(made, TokenizersBackend), name
        builder = next(parent for parent in made.__mro__ if "__init__" in vars(parent))
        assert builder is not TokenizersBackend, name


def test_what_the_class_decides_is_said(tmp_path: Path) -> None:
    chosen = Tokenizer.from_folder(write(tmp_path / "a", "Llama 2, legacy absent")).choices
    assert chosen.measured()["pipeline"] == "LlamaTokenizer"
    assert chosen.log_fields()["pipeline"] == "LlamaTokenizer"
    (note,) = (note for note in chosen.notes if "class" in note)
    assert note.startswith(
        "The tokenizer's class LlamaTokenizer decides normalizer, pre_tokenizer, as in transformers 5"
    )
    generic = Tokenizer.from_folder(write(tmp_path / "b", "Mistral v0.1")).choices
    assert generic.measured()["pipeline"] == "tokenizer.json"
    assert not [note for note in generic.notes if "class" in note]
    equal = Tokenizer.from_folder(text_folder(tmp_path / "c", of_class("LlamaTokenizer"), METASPACE)).choices
    assert not [note for note in equal.notes if "class" in note]


METASPACE = pieces(
    normalizer=None,
    pre_tokenizer={"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False},
)


def test_a_class_that_is_not_in_the_table_follows_the_file_and_is_named(tmp_path: Path) -> None:
    chosen = Tokenizer.from_folder(text_folder(tmp_path / "m", of_class("T5Tokenizer"), pieces())).choices
    assert chosen.pipeline == "tokenizer.json"
    assert any("a tokenizer of the class T5Tokenizer anew; here tokenizer.json alone" in note for note in chosen.notes)


def of_model(kind: str) -> Change:
    """Llama's pieces with another model than BPE; the last ten are words."""

    def change(document: dict[str, Any]) -> None:
        pieces()(document)
        ids = document["model"]["vocab"]
        scored = [[piece, -1.0 if number >= len(ids) - 10 else -9.0] for piece, number in ids.items()]
        document["model"] = {
            "Unigram": {"type": "Unigram", "unk_id": 0, "byte_fallback": True, "vocab": scored},
            "WordPiece": {
                "type": "WordPiece",
                "vocab": ids,
                "unk_token": "<unk>",
                "continuing_subword_prefix": "",
                "max_input_chars_per_word": 100,
            },
            "WordLevel": {"type": "WordLevel", "vocab": ids, "unk_token": "<unk>"},
        }[kind]

    return change


@pytest.mark.parametrize("kind", ["Unigram", "WordPiece", "WordLevel"])
def test_a_llama_class_over_another_model_than_bpe_follows_the_file_and_is_named(tmp_path: Path, kind: str) -> None:
    """The class of transformers 5.23 makes a BPE without merges of it, which cuts all into letters."""
    folder = text_folder(tmp_path / "m", of_class("LlamaTokenizer", **LLAMA), of_model(kind))
    ours = Tokenizer.from_folder(folder)
    of_file = TokenizersBackend(tokenizer_file=str(folder / "tokenizer.json"))
    for text in random_texts(50):
        ids = of_file(text)["input_ids"]
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == of_file.decode(ids, skip_special_tokens=True), text
    assert any("a tokenizer of the class LlamaTokenizer anew; here tokenizer.json" in n for n in ours.choices.notes)


@pytest.mark.parametrize("name", ["legacy", "add_prefix_space"])
def test_a_field_of_the_class_that_is_no_boolean_is_refused(tmp_path: Path, name: str) -> None:
    folder = text_folder(tmp_path / "m", of_class("LlamaTokenizer", **{name: "false"}), pieces())
    with pytest.raises(
        RuntimeFailure, match=f"tokenizer_config.json: {name} is 'false'; it must be true, false or null"
    ):
        Tokenizer.from_folder(folder)
