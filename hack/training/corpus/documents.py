"""The documents of three slices, those of training apart from those held out.

    prose   what a file documents, as running text
    chat    questions about what a file documents, answered with its words
    code    the standard library without its documentation

A file is held out with everything in it, and becomes prose or a chat, never both. A paragraph that stands in
several files is kept once; of what is held out, paragraphs that training saw are dropped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hack.training.conversations import Message
from hack.training.corpus.python_files import DocumentedItem, code, entries
from hack.training.corpus.sources import SOURCES, TextSource, files, is_held_out

PROSE, CODE, CHAT = "prose", "code", "chat"
SLICES = (PROSE, CODE, CHAT)
CHAT_TURNS, MAX_ANSWER_CHARACTERS = 6, 600
MAX_PIECE_CHARACTERS = 2000  # of prose and code: about one row of training
MIN_CHARACTERS = {PROSE: 200, CODE: 400, CHAT: 0}
MIN_REPEATED_CHARACTERS = 40  # shorter blocks of code repeat everywhere
QUESTIONS = {
    "module": ("What is the module `{name}` for?", "Describe the module `{name}`."),
    "class": ("What is `{name}`?", "Describe the class `{name}`."),
    "function": ("What does `{name}` do?", "Describe the function `{name}`."),
    "field": ("What is the field `{name}` for?", "Describe the field `{name}`."),
}


@dataclass(frozen=True, slots=True)
class CorpusDocument:
    """One document; `content` is a text, or the messages of a chat."""

    slice: str
    source: str
    path: str
    content: str | tuple[Message, ...]

    @property
    def characters(self) -> int:
        if isinstance(self.content, str):
            return len(self.content)
        return sum(len(message.content) for message in self.content)


@dataclass(frozen=True, slots=True)
class Corpus:
    training: tuple[CorpusDocument, ...]
    held_out: tuple[CorpusDocument, ...]

    @property
    def sha256(self) -> str:
        """Of all documents, with their order: two trainings of the same value saw the same text."""
        digest = hashlib.sha256()
        for document in self.training + self.held_out:
            digest.update(repr(document).encode())
        return digest.hexdigest()


def read_corpus(sources: Sequence[TextSource] = SOURCES) -> Corpus:
    """Every document of these sources, in the order of sources and paths."""
    seen: set[str] = set()
    parts = []
    for held_out in (False, True):  # training first, so that what is held out loses its repeats
        found: list[CorpusDocument] = []
        for source in sources:
            for path, text in files(source):
                if is_held_out(source.name, path) == held_out:
                    found += _documents(source, path, text, seen, held_out)
        parts.append(tuple(found))
    return Corpus(*parts)


def _documents(source: TextSource, path: str, text: str, seen: set[str], held_out: bool) -> Iterator[CorpusDocument]:
    documented = [fresh for entry in entries(text) if (fresh := _without_repeats(entry, seen))]
    contents: list[tuple[str, str | tuple[Message, ...]]]
    if _is_chat(source.name, path):
        contents = [(CHAT, chat) for chat in chats(documented, _module(path))]
    else:
        contents = [(PROSE, piece) for piece in pieces(prose(documented))]
    if source.has_code:
        contents += [(CODE, piece) for piece in pieces(_code_without_repeats(code(text), seen, held_out))]
    for slice_name, content in contents:
        document = CorpusDocument(slice_name, source.name, path, content)
        if document.characters > MIN_CHARACTERS[slice_name]:
            yield document


def prose(documented: Sequence[DocumentedItem]) -> str:
    """Paragraphs below each other; that of a field begins with its name."""
    lines = []
    for entry in documented:
        first = f"{entry.name.rpartition('.')[2]}: " if entry.kind == "field" else ""
        lines += [first + entry.paragraphs[0], *entry.paragraphs[1:]]
    return "\n\n".join(lines)


def chats(documented: Sequence[DocumentedItem], module: str) -> list[tuple[Message, ...]]:
    """Conversations of at most CHAT_TURNS questions, about neighbours of one file."""
    exchanges = [_exchange(entry, module) for entry in documented]
    return [
        tuple(message for exchange in exchanges[start : start + CHAT_TURNS] for message in exchange)
        for start in range(0, len(exchanges), CHAT_TURNS)
    ]


def pieces(text: str) -> list[str]:
    """The text cut between paragraphs, or blocks of code, into pieces of about MAX_PIECE_CHARACTERS."""
    found: list[list[str]] = [[]]
    size = 0
    for block in text.split("\n\n"):
        if size and size + len(block) > MAX_PIECE_CHARACTERS:
            found.append([])
            size = 0
        found[-1].append(block)
        size += len(block) + 2
    return ["\n\n".join(blocks) for blocks in found]


def _exchange(entry: DocumentedItem, module: str) -> tuple[Message, Message]:
    name = entry.name or module
    phrasings = QUESTIONS[entry.kind]
    question = phrasings[_digest(name) % len(phrasings)].format(name=name)
    answer = entry.paragraphs[0]
    for paragraph in entry.paragraphs[1:]:
        if len(answer) + len(paragraph) > MAX_ANSWER_CHARACTERS:
            break
        answer += f"\n\n{paragraph}"
    return Message("user", question), Message("assistant", answer)


def _without_repeats(entry: DocumentedItem, seen: set[str]) -> DocumentedItem | None:
    """The entry with the paragraphs that are met for the first time; None without any."""
    fresh = tuple(paragraph for paragraph in entry.paragraphs if paragraph not in seen)
    seen.update(fresh)
    return DocumentedItem(entry.kind, entry.name, fresh) if fresh else None


def _code_without_repeats(text: str, seen: set[str], held_out: bool) -> str:
    """Of code that is held out, the blocks (between empty lines) that training did not see."""
    blocks = text.split("\n\n")
    if held_out:
        return "\n\n".join(block for block in blocks if block not in seen)
    seen.update(block for block in blocks if len(block) >= MIN_REPEATED_CHARACTERS)
    return text


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _is_chat(source_name: str, path: str) -> bool:
    return _digest(f"{source_name}\0{path}") % 2 == 0


def _digest(text: str) -> int:
    return hashlib.sha256(text.encode()).digest()[-1]
