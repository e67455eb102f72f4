"""Held-out documents of a JSONL file: what a changed model is judged on. No torch.

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}], "slice": "chat"}
    {"prompt": "…", "completion": "…", "slice": "code"}
    {"text": "…"}

Judged are the tokens of the last answer with the token that ends it, of the completion, or of the text without its
first token. `slice` groups documents; the default is `all`.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from millstream_runtime.errors import InvalidConfigError
from millstream_runtime.tokenizing.chat_template import ChatTemplateError
from millstream_runtime.tokenizing.tokenizer import Tokenizer

MAX_FILE_BYTES = 256 << 20
MAX_DOCUMENTS = 100_000
MAX_SLICE_NAME_CHARACTERS = 40
DEFAULT_SLICE = "all"
FORMS = '"messages", "prompt" and "completion", or "text"'


@dataclass(frozen=True, slots=True)
class Document:
    """One line of the file: its answer is judged behind its prompt, which may be empty."""

    line: int  # from 1
    slice: str
    messages: tuple[dict[str, str], ...]  # of a chat, without the answer
    prompt: str  # of a completion
    answer: str
    path: Path  # of the file

    @property
    def where(self) -> str:
        """The line and its file, as messages name it."""
        return f"Line {self.line} of {self.path}"


@dataclass(frozen=True, slots=True)
class TokenizedDocument:
    """`token_ids[num_prompt_tokens:]` are judged; `num_prompt_tokens` is at least 1."""

    line: int
    slice: str
    token_ids: list[int]
    num_prompt_tokens: int
    is_cut: bool  # longer than the limit: its end is missing

    @property
    def num_judged_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


def content_of(document: Document) -> str:
    """Return what makes two lines the same document: all but its slice."""
    return json.dumps([document.messages, document.prompt, document.answer])


def read_documents_once(path: Path, max_documents: int, flag: str = "--data") -> tuple[list[Document], int]:
    """Return the first line of each document of a slice, at most `max_documents`, and how many lines repeat one.

    A document that is judged twice weighs twice, and intervals drawn from such a file are too narrow. Each slice has
    figures of its own, so a document may be in several.

    Raises:
        InvalidConfigError: see `read_documents`.
    """
    unique: dict[tuple[str, str], Document] = {}
    num_repeated = 0
    for document in _documents(path, flag):
        key = document.slice, content_of(document)
        if key in unique:
            num_repeated += 1
        elif len(unique) < max_documents:
            unique[key] = document
        else:
            break
    return list(unique.values()), num_repeated


def read_documents(path: Path, max_documents: int = MAX_DOCUMENTS, flag: str = "--data") -> list[Document]:
    """Return the documents in the order of the file, at most `max_documents`. `flag`: what named it, for messages.

    Raises:
        InvalidConfigError: the file cannot be read or is too large, or a line is no document; the message has its
            number.
    """
    return list(islice(_documents(path, flag), max_documents))


def _documents(path: Path, flag: str) -> Iterator[Document]:
    """Lines are read one by one: a bad one behind the last that is wanted is no error."""
    has_document = False
    for number, line in enumerate(_lines(path, flag), 1):
        if line.strip():
            has_document = True
            yield _document(line, number, path)
    if not has_document:
        raise InvalidConfigError(f"{flag} {path} has no document; each line is a JSON object with {FORMS}.")


def _lines(path: Path, flag: str) -> list[str]:
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):  # it is read more than once
            raise InvalidConfigError(f"{flag} {path} is a pipe or a device; give a regular file.")
        if found.st_size > MAX_FILE_BYTES:
            raise InvalidConfigError(f"{flag} {path} has more than {MAX_FILE_BYTES >> 20} MiB; give a sample of it.")
        content = path.read_bytes()
        return content.decode("utf-8-sig").split("\n")  # some editors begin a file with a mark
    except OSError as error:
        raise InvalidConfigError(f"Cannot read {flag} {path}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        bad = content.count(b"\n", 0, error.start) + 1
        raise InvalidConfigError(f"Line {bad} of {path} is not UTF-8, at byte {error.start} of the file.") from None


def documents_digest(path: Path, flag: str) -> str:
    """Return the SHA-256 of the file, hexadecimal.

    Raises:
        InvalidConfigError: it cannot be read any more.
    """
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise InvalidConfigError(f"Cannot read {flag} {path}: {error.strerror}.") from None


def tokenize(
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    eos_token_ids: frozenset[int],
    max_tokens: int,
    flag: str | None = None,
) -> list[TokenizedDocument]:
    """Return the documents as token ids, each cut to `max_tokens`. `flag`: what could make that more, for messages.

    Raises:
        InvalidConfigError: a chat that the model's template refuses, a prompt that leaves no room for its answer, or
            a document without a token to judge; the message has its line and file.
    """
    return [_tokenized(document, tokenizer, eos_token_ids, max_tokens, flag) for document in documents]


def _tokenized(
    document: Document, tokenizer: Tokenizer, eos_token_ids: frozenset[int], max_tokens: int, flag: str | None
) -> TokenizedDocument:
    if document.messages:
        prompt, answer = _chat(document, tokenizer, eos_token_ids)
    elif document.prompt:
        prompt = tokenizer.encode(document.prompt)
        answer = tokenizer.encode(document.answer, add_special_tokens=False)
    else:
        ids = tokenizer.encode(document.answer)
        prompt, answer = [], ids
    if not prompt:  # nothing predicts the first token of a sequence
        prompt, answer = answer[:1], answer[1:]
    if len(prompt) >= max_tokens:
        raise InvalidConfigError(
            f"{document.where}: its prompt has {len(prompt)} tokens, and prompt and answer together have at most "
            f"{max_tokens}; shorten it{f' or give a larger {flag}' if flag is not None else ''}."
        )
    if not answer:
        raise InvalidConfigError(f"{document.where}: it has no token to judge; give it a longer answer or text.")
    ids = prompt + answer
    return TokenizedDocument(document.line, document.slice, ids[:max_tokens], len(prompt), len(ids) > max_tokens)


def _chat(document: Document, tokenizer: Tokenizer, eos_token_ids: frozenset[int]) -> tuple[list[int], list[int]]:
    """The template writes what ends a turn, so the answer is found in the whole conversation where that begins with
    the prompt. Some templates change earlier turns; then the answer stands without the token that ends it."""
    if not tokenizer.has_chat_template:
        raise InvalidConfigError(
            f"{document.where} has messages, and the model has no chat template; give prompt and completion."
        )
    try:
        prompt = tokenizer.encode_chat(document.messages)
        whole = tokenizer.encode_chat((*document.messages, {"role": "assistant", "content": document.answer}))
    except ChatTemplateError as error:
        raise InvalidConfigError(f"{document.where}: {error}") from None
    rest = whole[len(prompt) :]
    end = next((index for index, token in enumerate(rest) if token in eos_token_ids), None)
    if whole[: len(prompt)] != prompt or end is None:
        return prompt, tokenizer.encode(document.answer, add_special_tokens=False)
    return prompt, rest[: end + 1]


def _document(line: str, number: int, path: Path) -> Document:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise InvalidConfigError(f"Line {number} of {path} is not JSON.") from None
    if not isinstance(found, dict):
        raise InvalidConfigError(f"Line {number} of {path} must be a JSON object with {FORMS}.")
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidConfigError(
            f"Line {number} of {path} has half of a surrogate pair, such as \\ud83d alone."
        ) from None
    name = found.get("slice", DEFAULT_SLICE)
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_SLICE_NAME_CHARACTERS or not name.isprintable():
        raise InvalidConfigError(
            f"Line {number} of {path}: slice must be a name of 1 to {MAX_SLICE_NAME_CHARACTERS} printable characters."
        )
    forms = [form for form in ("messages", "completion", "text") if form in found]
    if len(forms) != 1:
        raise InvalidConfigError(f"Line {number} of {path} must have either {FORMS}; it has {sorted(found)[:8]}.")
    if forms[0] == "messages":
        messages = _messages(found["messages"], number, path)
        return Document(number, name, messages[:-1], "", messages[-1]["content"], path)
    prompt = _text(found, "prompt", number, path) if forms[0] == "completion" else ""
    return Document(number, name, (), prompt, _text(found, forms[0], number, path), path)


def _messages(found: Any, number: int, path: Path) -> tuple[dict[str, str], ...]:
    are_messages = isinstance(found, list) and all(
        isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)
        for one in found
    )
    if not are_messages or len(found) < 2 or found[-1]["role"] != "assistant":
        raise InvalidConfigError(
            f"Line {number} of {path}: messages must be a list of role and content, both strings, of which the last is "
            "the assistant's."
        )
    return tuple({"role": one["role"], "content": one["content"]} for one in found)


def _text(found: dict[str, Any], field: str, number: int, path: Path) -> str:
    value = found.get(field)
    if not isinstance(value, str) or not value:
        raise InvalidConfigError(f"Line {number} of {path}: {field} must be a string that is not empty.")
    return value
