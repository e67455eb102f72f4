"""tokenizer.json of one byte per token with parts of a test's choice: hostile ones, and those of published models."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.tiny_model import byte_level_tokenizer, write_tiny_model

Part = dict[str, Any]
PROMPT: Part = {"Sequence": {"id": "A", "type_id": 0}}
SECOND: Part = {"Sequence": {"id": "B", "type_id": 1}}
METASPACE: Part = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
BYTE_LEVEL: Part = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
# Tries more ways than Oniguruma allows on a run of `a` that something else ends: a panic of the library.
TRIES_ALL_WAYS: Part = {
    "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a|a?)+$"}, "behavior": "Isolated", "invert": False}
}
ALL_WAYS_PROMPT = "a" * 40 + "b"


def tokenizer_json(**parts: object) -> bytes:
    """The tiny model's tokenizer with other parts."""
    content = json.loads(byte_level_tokenizer().to_str())
    return json.dumps({**content, **parts}).encode()


def write_model(folder: Path, **parts: object) -> Path:
    """The tiny model with such a tokenizer."""
    write_tiny_model(folder)
    (folder / "tokenizer.json").write_bytes(tokenizer_json(**parts))
    return folder


def sequence(*steps: Part) -> Part:
    """A sequence of normalizers."""
    return {"type": "Sequence", "normalizers": list(steps)}


def replace(text: str, content: str) -> Part:
    return {"type": "Replace", "pattern": {"String": text}, "content": content}


def replace_matches(pattern: str, content: str) -> Part:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def template(*single: Part, special_tokens: Mapping[str, object] | None = None) -> Part:
    pair = [PROMPT, SECOND]
    return {
        "type": "TemplateProcessing",
        "single": list(single),
        "pair": pair,
        "special_tokens": dict(special_tokens or {}),
    }


def precompiled(texts: Mapping[str, str]) -> Part:
    """A normalizer as SentencePiece compiles it, which maps characters to texts.

    It is a double array (darts-clone): a unit has the label of the byte that leads to it in bits 0 to 7, bit 8 where a
    text ends, and the distance to its children, by exclusive or, from bit 10 on. Each node has a block of 256 units.
    """
    units, contents, blocks = [0] * 256, b"", 1
    nodes: dict[bytes, int] = {b"": 0}
    children: dict[bytes, set[int]] = {}
    for text in texts:
        key = text.encode()
        for length in range(len(key)):
            children.setdefault(key[:length], set()).add(key[length])
    base_of: dict[bytes, int] = {}
    for node in sorted({*children, *(text.encode() for text in texts)}, key=len):
        base_of[node] = 256 * blocks
        blocks += 1
    units = [0] * (256 * blocks)
    for node, base in base_of.items():
        place = nodes[node]
        units[place] |= (place ^ base) << 10
        for byte in children.get(node, ()):
            nodes[node + bytes([byte])] = base ^ byte
            units[base ^ byte] = byte
    for text, content in texts.items():
        node = text.encode()
        units[nodes[node]] |= 1 << 8
        units[base_of[node]] |= len(contents) | (1 << 31)
        contents += content.encode() + b"\0"
    trie = struct.pack(f"<{len(units)}I", *units)
    whole = struct.pack("<I", len(trie)) + trie + contents
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(whole).decode()}
