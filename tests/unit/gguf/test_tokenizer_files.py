"""The vocabulary of a GGUF file gives the ids of the tokenizer that it was made from."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer

from benchmarks.gguf_llama import read_vocabulary
from millstream_runtime.errors import RuntimeFailure
from millstream_runtime.gguf.tokenizer_files import tokenizer_config, tokenizer_json
from millstream_runtime.tokenizing.tokenizer import Tokenizer
from tests.support.family_cases import dense
from tests.support.gguf_files import write_gguf
from tests.support.tiny_families import write_family

DEMO = Path(__file__).resolve().parents[3] / "models" / "demo-chat"
TEXTS = (
    "",
    "Hello, world!",
    "  two  spaces\n\n\tand tabs ",
    "It's 12345 o'clock, we'll see I'M",
    "naïve café 😀🇩🇪 中文字",
    "a\u0000b \ufffd",
    "<|im_start|>user\nhi<|im_end|>\n",
    "def f(x):\n    return x**2  # ok\r\n",
    "x" * 300,
)


def demo_metadata(pre: str = "gpt-2", **more: Any) -> dict[str, Any]:
    tokens, merges, special = read_vocabulary(DEMO / "tokenizer.json")
    kinds = [3 if one in special else 1 for one in tokens]
    fields = {"model": "gpt2", "pre": pre, "tokens": tokens, "merges": merges, "token_type": kinds, **more}
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items() if value is not None}


def reading(metadata: dict[str, Any]) -> FastTokenizer:
    return FastTokenizer.from_str(json.dumps(tokenizer_json(metadata, "m.gguf")))


@pytest.mark.parametrize("text", TEXTS)
def test_a_byte_level_vocabulary_gives_the_same_ids_and_text(text: str) -> None:
    ours, theirs = reading(demo_metadata()), FastTokenizer.from_file(str(DEMO / "tokenizer.json"))
    ids = theirs.encode(text).ids
    assert ours.encode(text).ids == ids
    assert ours.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "I'll 12345\n\nx", ["I", "'ll", " 12345", "\n", "\n", "x"]),
        ("llama-bpe", "I'LL 12345\n\nx", ["I", "'LL", " ", "123", "45", "\n\n", "x"]),
        ("qwen2", "I'LL 123 (a)\n", ["I", "'LL", " ", "1", "2", "3", " (", "a", ")\n"]),
        ("smollm", "ab 123", ["ab", " ", "1", "2", "3"]),
    ],
)
def test_a_text_is_cut_as_the_models_own_tokenizer_cuts_it(pre: str, text: str, pieces: list[str]) -> None:
    """Each piece that is one run of merges; here shown by a vocabulary of bytes alone."""
    tokenizer = reading(demo_metadata(pre))
    cut = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cut] == pieces


def piece_metadata(**more: Any) -> dict[str, Any]:
    """SentencePiece: bytes, letters and pieces, the longer the likelier."""
    letters = [*"abcdehlnorstw", "\u2581", ".", "é"]
    pieces = [
        "he",
        "ll",
        "hell",
        "hello",
        "\u2581w",
        "or",
        "ld",
        "\u2581wor",
        "\u2581world",
        "\u2581hello",
        "\u2581\u2581",
    ]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *letters]
    kinds = [2, 3, 3, *([6] * 256), *([1] * (len(pieces) + len(letters)))]
    scores = [*([0.0] * 259), *(-float(rank) for rank in range(len(pieces) + len(letters)))]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    fields = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": kinds, **ids, **more}
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items() if value is not None}


def sentence_piece(text: str, metadata: dict[str, Any]) -> list[int]:
    """SentencePiece's own way: the neighbours whose joint piece has the best score are joined, until none has one."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    ids = {token: number for number, token in enumerate(tokens)}
    pieces = [*("\u2581" + text.replace(" ", "\u2581"))]
    while True:
        joined = [(scores[ids[a + b]], -at) for at, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in ids]
        if not joined:
            break
        at = -max(joined)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    found = []
    for piece in pieces:
        found += [ids[piece]] if piece in ids else [ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
    return found


@pytest.mark.parametrize("text", ["hello world", " hello  world.", "é€😀 x\n", "hellhello or ld", "wwworld helll"])
def test_sentence_piece_gives_the_ids_of_its_scores(text: str) -> None:
    metadata = piece_metadata()
    ours, expected = reading(metadata), sentence_piece(text, metadata)
    assert ours.encode(text, add_special_tokens=False).ids == expected
    assert ours.encode(text).ids == [1, *expected]
    assert ours.decode(expected) == text


def test_without_a_space_before_the_text() -> None:
    """Gemma."""
    ours = reading(piece_metadata(add_space_prefix=False, add_bos_token=False))
    assert [ours.id_to_token(one) for one in ours.encode("hello world").ids] == ["hello", "\u2581world"]
    assert ours.decode(ours.encode(" hello").ids) == " hello"


def test_special_tokens_and_the_template() -> None:
    metadata = demo_metadata(bos_token_id=1, eos_token_id=2) | {"tokenizer.chat_template": "{{ bos_token }}"}
    assert tokenizer_config(metadata, "m.gguf") == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "chat_template": "{{ bos_token }}",
    }


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({}, "tokenizer.ggml.model 'missing'"),
        (demo_metadata(model="bert"), "tokenizer.ggml.model 'bert'"),
        (demo_metadata(tokens=None), "tokenizer.ggml.model"),
        (demo_metadata(tokens=[1, 2]), "tokenizer.ggml.tokens"),
        (demo_metadata("chatglm-bpe"), "tokenizer.ggml.pre 'chatglm-bpe'"),
        (demo_metadata(token_type=[1]), "tokenizer.ggml.token_type a list of 1"),
        (demo_metadata(merges=["a"]), "tokenizer.ggml.merges 'a'"),
        (demo_metadata(merges=["a no-such-token"]), "tokenizer.ggml.merges"),
        (demo_metadata(bos_token_id="1", add_bos_token=True), "tokenizer.ggml.bos_token_id '1'"),
        (piece_metadata(scores=[0.5]), "tokenizer.ggml.scores a list of 1"),
        (piece_metadata(add_bos_token="yes"), "tokenizer.ggml.add_bos_token 'yes'"),
    ],
)
def test_a_vocabulary_that_cannot_be_read_is_named(metadata: dict[str, Any], words: str) -> None:
    with pytest.raises(RuntimeFailure) as refused:
        tokenizer_json(metadata, "m.gguf")
    assert words in refused.value.message.replace("'a list", "a list")


def test_a_tokenizer_json_next_to_the_file_comes_first(tmp_path: Path) -> None:
    write_family(tmp_path / "plain", **dense("llama"))
    write_gguf(tmp_path / "plain", tmp_path / "m" / "model.gguf", lambda module: "F16", **demo_metadata())
    text = "Hello <|im_end|>"
    from_file = Tokenizer.from_folder(tmp_path / "m").encode(text)
    document = json.loads((DEMO / "tokenizer.json").read_text())
    document["post_processor"] = None
    document["model"]["merges"] = []
    (tmp_path / "m" / "tokenizer.json").write_text(json.dumps(document))
    assert len(Tokenizer.from_folder(tmp_path / "m").encode(text)) > len(from_file)
