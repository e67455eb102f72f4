"""What a line of the data may be, what of it is judged, and what a bad line says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from millstream_runtime.errors import InvalidConfigError
from millstream_runtime.quality.documents import (
    TokenizedDocument,
    documents_digest,
    read_documents,
    read_documents_once,
    tokenize,
)
from millstream_runtime.tokenizing.tokenizer import Tokenizer
from tests.unit.quality.conftest import write_data

IM_END = frozenset({258})
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}], "slice": "chat"}


def tokenized(base: Path, tmp_path: Path, *lines: Any, max_tokens: int = 100) -> list[TokenizedDocument]:
    documents = read_documents(write_data(tmp_path / "data.jsonl", lines))
    return tokenize(documents, Tokenizer.from_folder(base), IM_END, max_tokens)


def judged_text(base: Path, document: TokenizedDocument) -> str:
    tokenizer = Tokenizer.from_folder(base)
    ids = document.token_ids[document.num_prompt_tokens :]
    return b"".join(tokenizer.token_bytes(one) for one in ids).decode()


def test_of_a_chat_the_last_answer_and_the_token_that_ends_it_are_judged(base: Path, tmp_path: Path) -> None:
    [document] = tokenized(base, tmp_path, CHAT)
    assert judged_text(base, document) == "yes<|im_end|>"
    assert document.slice == "chat"


def test_of_a_completion_the_answer_and_of_a_text_all_but_its_first_token_are_judged(
    base: Path, tmp_path: Path
) -> None:
    lines = ({"prompt": "def f", "completion": "(x):"}, {"text": "abc"})
    completion, text = tokenized(base, tmp_path, *lines)
    assert judged_text(base, completion) == "(x):"
    assert judged_text(base, text) == "bc"
    assert (completion.slice, completion.line, text.line) == ("all", 1, 2)


def test_a_file_as_editors_on_windows_save_it_has_the_same_documents(base: Path, tmp_path: Path) -> None:
    lines = "\r\n".join(json.dumps(one) for one in (CHAT, {"text": "abc"}))
    path = tmp_path / "data.jsonl"
    path.write_bytes(lines.encode("utf-8-sig"))
    documents = read_documents(path)
    assert [(one.line, one.answer) for one in documents] == [(1, "yes"), (2, "abc")]


def test_a_document_counts_once_however_often_it_is_in_the_file(tmp_path: Path) -> None:
    other = CHAT | {"messages": [*CHAT["messages"][:1], {"role": "assistant", "content": "no"}]}
    lines = (CHAT, {"text": "abc"}, CHAT | {"slice": "again"}, other, {"text": "abc"}, {"text": "abcd"})
    path = write_data(tmp_path / "data.jsonl", lines)
    documents, num_repeated = read_documents_once(path, 10)
    assert [(one.line, one.slice) for one in documents] == [
        (1, "chat"),
        (2, "all"),
        (3, "again"),
        (4, "chat"),
        (6, "all"),
    ]
    assert num_repeated == 1
    documents, _ = read_documents_once(path, 3)
    assert [one.line for one in documents] == [1, 2, 3]


def test_half_of_a_surrogate_pair_is_refused_with_its_line(tmp_path: Path) -> None:
    """JSON can spell it, and no tokenizer reads it."""
    path = write_data(tmp_path / "data.jsonl", ({"text": "abc \U0001f600"}, {"text": "abc \ud83d"}))
    with pytest.raises(InvalidConfigError, match=r"Line 2 of .* half of a surrogate pair"):
        read_documents(path)


def test_behind_a_prompt_without_tokens_the_first_token_is_not_judged(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some tokenizers strip text: a prompt of spaces has no tokens then."""
    encode = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text, special=True, **_: encode(self, text.strip(), special))
    [document] = tokenized(base, tmp_path, {"prompt": "  ", "completion": "abc"})
    assert (document.num_prompt_tokens, document.num_judged_tokens) == (1, 2)


def test_a_longer_document_is_cut_and_says_so(base: Path, tmp_path: Path) -> None:
    short, long = tokenized(base, tmp_path, {"text": "abc"}, {"text": "a" * 50}, max_tokens=10)
    assert (short.is_cut, long.is_cut) == (False, True)
    assert len(long.token_ids) == 10


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "Line 2 of .* is not JSON"),
        ("[" * 100_000, "Line 2 of .* is not JSON"),
        ("[]", "Line 2 of .* must be a JSON object"),
        ('{"prompt": "a"}', "Line 2 of .* must have either"),
        ('{"text": "a", "completion": "b", "prompt": "c"}', "Line 2 of .* must have either"),
        ('{"text": ""}', "text must be a string that is not empty"),
        ('{"completion": "b"}', "prompt must be a string"),
        ('{"text": "a", "slice": ""}', "slice must be a name"),
        ('{"text": "a", "slice": 3}', "slice must be a name"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "the last is the assistant's"),
        ('{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}', "the last is the"),
        ('{"messages": [{"role": "user", "content": []}, {"role": "assistant", "content": "b"}]}', "both strings"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"text": "fine"}) + "\n" + line + "\n")
    with pytest.raises(InvalidConfigError, match=words):
        read_documents(path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            {"prompt": "a" * 200, "completion": "b"},
            "Line 1 of .*: its prompt has 200 tokens, and prompt and answer together have at most 100",
        ),
        ({"text": "a"}, "Line 1 of .*: it has no token to judge"),
        (
            {"messages": [{"role": "pirate", "content": "a"}, {"role": "assistant", "content": "b"}]},
            "Line 1 of .*: .*roles are",
        ),
    ],
)
def test_a_document_that_cannot_be_judged_is_refused(
    base: Path, tmp_path: Path, line: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidConfigError, match=words):
        tokenized(base, tmp_path, line)


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match=r"Cannot read --data .*: No such file"):
        documents_digest(tmp_path / "absent.jsonl", "--data")  # it was there when its lines were read
    with pytest.raises(InvalidConfigError, match="No such file"):
        read_documents(tmp_path / "absent.jsonl")
    (tmp_path / "bytes.jsonl").write_bytes(b'{"text": "a"}\r\n{"text": "\xff"}')
    with pytest.raises(InvalidConfigError, match=r"Line 2 of .*bytes\.jsonl is not UTF-8, at byte 25 of the file"):
        read_documents(tmp_path / "bytes.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(InvalidConfigError, match="has no document"):
        read_documents(tmp_path / "empty.jsonl")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidConfigError, match="is a pipe or a device; give a regular file"):
        read_documents(tmp_path / "pipe")
    with pytest.raises(InvalidConfigError, match="Is a directory"):
        read_documents(tmp_path)
