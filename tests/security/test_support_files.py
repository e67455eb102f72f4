"""A hub, a registry or a mirror sends something else under the name of a tokenizer: the folder keeps nothing of it.

A shared library that lies in the pod under any name is code that a variable of the environment may load.
"""

from __future__ import annotations

import json
import struct
import sys
import zipfile
from io import BytesIO
from pathlib import Path

import pytest

from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.sources import support_files
from millstream_runtime.sources.client import RetryPolicy
from millstream_runtime.sources.fetch import FetchOptions, fetch
from millstream_runtime.sources.folder import PARTIAL_NAME
from millstream_runtime.sources.hugging_face import HuggingFace
from millstream_runtime.sources.image_source import ImageSource
from millstream_runtime.sources.lock import LockTimes
from millstream_runtime.sources.support_files import check_support_file
from tests.support.local_hub import LocalCDN, LocalHub
from tests.support.local_registry import LocalRegistry, tar_of
from tests.support.local_web import running
from tests.support.model_files import WANTED, Naps, model_files

OPTIONS = FetchOptions(lock_times=LockTimes(0.05, 5.0, 10.0, 0.02))


def policy() -> RetryPolicy:
    return RetryPolicy(attempts=2, timeout_seconds=20.0, sleep=Naps())


def archive() -> bytes:
    content = BytesIO()
    with zipfile.ZipFile(content, "w") as package:
        package.writestr("__main__.py", "import os")
    return content.getvalue()


def varint(value: int) -> bytes:
    encoded = b""
    while value > 0x7F:
        encoded, value = encoded + bytes([value & 0x7F | 0x80]), value >> 7
    return encoded + bytes([value])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def piece(text: bytes, score: float = 0.5, kind: int | None = None) -> bytes:
    typed = b"" if kind is None else b"\x18" + varint(kind)
    return field(1, field(1, text) + b"\x15" + struct.pack("<f", score) + typed)


def sentencepiece(pieces: int = 300) -> bytes:
    """As sentencepiece_model.proto says: pieces, and what they were trained with."""
    texts = [b"<unk>", "▁the".encode(), *(f"▁{number}".encode() for number in range(pieces))]
    model = b"".join(piece(text, kind=2 if text == b"<unk>" else None) for text in texts)
    return model + field(2, b"\x18\x01") + field(3, b"\x0a\x04nmt_") + varint(200 << 3 | 0) + b"\x01"


LIBRARY = Path(sys.executable).resolve().read_bytes()[: 1 << 16]  # an ELF file: its beginning is enough
OTHERS = {
    "a library": LIBRARY,
    "a library behind a brace": b"{" + LIBRARY,
    "an archive": archive(),
    "bytecode": b"\xa7\r\r\n" + bytes(12) + b"\xe3",
    "a pickle": b"\x80\x04cos\nsystem\n(S'id'\ntR.",
    "a program": b"#!/bin/sh\nid\n\0",
    "nothing": b"",
    "a pointer of LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
}
NAMES = ("tokenizer.model", "spiece.model", "tokenizer.json", "chat_template.jinja", "vocab.txt", "qwen.tiktoken")
EMPTY_MAY_BE = ("chat_template.jinja", "vocab.txt", "qwen.tiktoken")


def check(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / "sha256-00"  # as a download is called
    path.write_bytes(content)
    check_support_file(path, name, "org/tiny at main")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", OTHERS)
def test_another_content_is_refused_with_the_file_and_the_repository(tmp_path: Path, name: str, kind: str) -> None:
    if kind == "nothing" and name in EMPTY_MAY_BE:
        return check(tmp_path, name, b"")
    with pytest.raises(RuntimeFailure, match=f"^org/tiny at main: {name} is (not|a git-lfs pointer)") as caught:
        check(tmp_path, name, OTHERS[kind])
    assert caught.value.reason is FailureReason.CHECKPOINT_INVALID
    assert "\n" not in caught.value.message
    return None


RIGHT: dict[str, tuple[str, bytes]] = {
    "a tokenizer": ("tokenizer.json", b'{"model": {"vocab": {"\xe2\x96\x81a": 0}, "merges": [["a", "b"]]}}\n'),
    "a list": ("added.json", b"[]"),
    "what Python writes beyond JSON": ("trainer_state.json", b'{"loss": NaN, "limit": [0.0, Infinity]}'),
    "a byte order mark": ("config.json", b"\xef\xbb\xbf{}"),
    "a template": ("chat_template.jinja", "{{ messages }} – ▁\n".encode()),
    "merges": ("merges.txt", "#version: 0.2\nĠ t\n".encode()),
    "tokens of tiktoken": ("qwen.tiktoken", b"IQ== 0\nIg== 1\n"),
    "pieces": ("tokenizer.model", sentencepiece()),
    "pieces of another name": ("spiece.model", sentencepiece()),
    "tokens of tiktoken as GLM has them": ("tokenizer.model", b"IQ== 0\nIg== 1\n"),
}


@pytest.mark.parametrize("kind", RIGHT)
def test_what_models_have_is_kept(tmp_path: Path, kind: str) -> None:
    check(tmp_path, *RIGHT[kind])


DAMAGED = {
    "cut": sentencepiece()[:-1000],
    "a field that a model has not": sentencepiece() + field(6, b"x"),
    "a number where a message is": b"\x08\x01" + sentencepiece(),
    "a group": b"\x0b\x0c" + sentencepiece(),
    "no piece": field(2, b"\x18\x01"),
    "a piece without a text": field(1, b"\x15\0\0\0\0") + sentencepiece(),
    "a piece that is no UTF-8": piece(b"\xff\xfe") + sentencepiece(),
    "a library in a field of its own": piece(b"a") + field(7, LIBRARY),
    "a number without an end": b"\xff" * 11,
    "a line of tiktoken before a library": b"IQ== 0\n" + LIBRARY,
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_protobuf_that_is_no_sentencepiece_model_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(RuntimeFailure, match=r"tokenizer\.model is not SentencePiece's protobuf"):
        check(tmp_path, "tokenizer.model", DAMAGED[kind])


BROKEN_JSON = {
    "cut": b'{"model": {"vocab": {',
    "two values": b"{}{}",
    "a program": b"import os; os.system('id')",
    "nested without end": b"[" * 100_000 + b"]" * 100_000,
    "no UTF-8": b'{"a": "\xff"}',
    "a zero byte": b'{"a": 1}\0',
}


@pytest.mark.parametrize("kind", BROKEN_JSON)
def test_broken_json_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(RuntimeFailure, match=r"tokenizer\.json is not JSON, as its name says \(.*\)"):
        check(tmp_path, "tokenizer.json", BROKEN_JSON[kind])


def test_a_large_file_is_held_to_the_standard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's `json` makes objects of many times its size, so a large file is judged without it."""
    monkeypatch.setattr(support_files, "LENIENT_JSON_BYTES", 16)
    check(tmp_path, "tokenizer.json", b'{"a": [1.5, "\\u2581", true, null]}')
    with pytest.raises(RuntimeFailure, match=r"is not JSON"):
        check(tmp_path, "tokenizer.json", b'{"a": NaN, "b": 123456}')


def test_a_character_may_lie_across_two_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support_files, "PIECE_BYTES", 2)
    check(tmp_path, "chat_template.jinja", "a▁▁".encode())
    with pytest.raises(RuntimeFailure, match="it ends within a character"):
        check(tmp_path, "chat_template.jinja", "a▁".encode()[:-1])


@pytest.mark.parametrize("name", ["tokenizer.model", "chat_template.jinja", "tokenizer.json"])
def test_a_hub_that_sends_a_library_leaves_nothing_in_the_folder(tmp_path: Path, name: str) -> None:
    into = tmp_path / "model"
    with running(LocalCDN) as cdn, running(lambda: LocalHub(cdn, model_files() | {name: LIBRARY})) as hub:
        source = HuggingFace("org/tiny", "main", endpoint=hub.url, policy=policy())
        with pytest.raises(RuntimeFailure, match=rf"^org/tiny at main: {name} is not ") as caught:
            fetch(source, into, lambda _: None, OPTIONS)
        assert caught.value.reason is FailureReason.CHECKPOINT_INVALID
        assert not cdn.requests, "the weights are not fetched"
        assert not has(into, LIBRARY)
        assert {path.name for path in into.iterdir()} <= {PARTIAL_NAME}
        hub.files[name] = sentencepiece() if name == "tokenizer.model" else json.dumps({}).encode()
        fetch(source, into, lambda _: None, OPTIONS)
        assert {path.name for path in into.iterdir() if not path.name.startswith(".")} == WANTED | {name}


def test_an_image_with_a_library_for_a_tokenizer_leaves_nothing_in_the_folder(tmp_path: Path) -> None:
    files = {name: content for name, content in model_files().items() if name in WANTED}
    with running(LocalRegistry) as registry:
        members = [(f"models/{name}", content) for name, content in (files | {"tokenizer.model": LIBRARY}).items()]
        registry.image("1", tar_of(members))
        source = ImageSource(f"{registry.host}/org/tiny:1", docker_configs=[], policy=policy())
        with pytest.raises(RuntimeFailure, match=r"org/tiny.*: tokenizer\.model is not SentencePiece's protobuf"):
            fetch(source, tmp_path / "model", lambda _: None, OPTIONS)
    assert not has(tmp_path / "model", LIBRARY)


def has(folder: Path, content: bytes) -> bool:
    return any(path.is_file() and path.read_bytes() == content for path in folder.rglob("*"))
