"""models/held_out.jsonl: a sample of the files that training never saw, in the form that `millstream quality` reads.

It is committed, so that the figures of the models can be measured again where other versions of the packages are
installed. A chat is cut behind one of its answers, since only the last answer is judged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hack.training.conversations import Message
from hack.training.corpus.documents import CHAT, CODE, PROSE, SLICES, CorpusDocument
from hack.training.corpus.sources import SOURCES
from hack.training.tokenizer import TURN_END, TURN_START

NAME = "held_out.jsonl"
DOCUMENTS_PER_SLICE = {PROSE: 48, CODE: 24, CHAT: 72}  # few, since the file is in git
MAX_TEXT_CHARACTERS = 1200  # about as many tokens as are judged
MAX_CHAT_CHARACTERS = 1500


def write(path: Path, documents: Sequence[CorpusDocument]) -> None:
    """At most DOCUMENTS_PER_SLICE of each, chosen by a hash."""
    lines = []
    for name in SLICES:
        of_slice = sorted((one for one in documents if one.slice == name), key=_rank)
        lines += [json.dumps(_line(document)) for document in of_slice[: DOCUMENTS_PER_SLICE[name]]]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read(path: Path) -> list[dict[str, Any]]:
    """The lines as objects: `slice`, `source`, `license`, and `text` or `messages`."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def prompt_and_answer(line: dict[str, Any]) -> tuple[str, str]:
    """What stands before the judged text, which is empty for a text, and the judged text."""
    if "text" in line:
        return "", line["text"]
    *before, last = line["messages"]
    turns = [f"{TURN_START}{one['role']}\n{one['content']}{TURN_END}\n" for one in before]
    return "".join(turns) + f"{TURN_START}assistant\n", last["content"] + TURN_END


def _line(document: CorpusDocument) -> dict[str, Any]:
    line: dict[str, Any] = {
        "slice": document.slice,
        "source": f"{document.source}: {document.path}",
        "license": next(source.license for source in SOURCES if source.name == document.source),
    }
    if isinstance(document.content, str):
        return line | {"text": document.content[:MAX_TEXT_CHARACTERS]}
    return line | {"messages": [{"role": one.role, "content": one.content} for one in _cut(document.content)]}


def _cut(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Whole exchanges: a number of them that the first question decides, within MAX_CHAT_CHARACTERS."""
    exchanges = 1 + hashlib.sha256(messages[0].content.encode()).digest()[0] % (len(messages) // 2)
    while exchanges > 1 and sum(len(one.content) for one in messages[: 2 * exchanges]) > MAX_CHAT_CHARACTERS:
        exchanges -= 1
    return messages[: 2 * exchanges]


def _rank(document: CorpusDocument) -> bytes:
    return hashlib.sha256(repr(document).encode()).digest()
