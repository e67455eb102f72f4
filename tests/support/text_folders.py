"""Model folders that spell their tokens in one file or another: the kinds that are published, small."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.support.tiny_model import DEFAULT_CONFIG, byte_level_tokenizer

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}[assistant] "
MARKER_TEMPLATE = "{% for m in messages %}<|turn|>{{ m.role }} {{ m.content }}<|end_turn|>{% endfor %}<|turn|>assistant"
EXACT = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
NAMED = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
MARKERS = ["<|turn|>", "<|end_turn|>"]
FIRST_FREE = 259  # behind the tokens of the tiny model, whose embedding has 272 rows
Files = Mapping[str, Any]


def token(content: str, *, special: bool = True, **more: Any) -> dict[str, Any]:
    """An entry of `added_tokens_decoder`."""
    return {"content": content, "special": special, **EXACT, **more}


def stated(*contents: str, **more: Any) -> dict[str, Any]:
    """An `added_tokens_decoder` with the tiny model's tokens and these behind them."""
    own = dict(enumerate(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), FIRST_FREE - 3))
    tokens = {number: token(content) for number, content in own.items()}
    tokens |= {number: token(content, **more) for number, content in enumerate(contents, FIRST_FREE)}
    return {str(number): value for number, value in tokens.items()}


def settings(**more: Any) -> dict[str, Any]:
    """A tokenizer_config.json without special tokens."""
    return {"tokenizer_class": "PreTrainedTokenizerFast", **more}


def text_folder(folder: Path, files: Files, change: Callable[[dict[str, Any]], None] | None = None) -> Path:
    """Write config.json and tokenizer.json of the tiny model, and these files. `change`: its tokenizer.json.

    A value of None removes a file, a text is written as it is, and all else as JSON.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(DEFAULT_CONFIG))
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    if change is not None:
        document = json.loads((folder / "tokenizer.json").read_text())
        change(document)
        (folder / "tokenizer.json").write_text(json.dumps(document))
    for name, content in files.items():
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


SPACE = "\u2581"
PIECES = [SPACE, "H", "i", "e", "l", "o", "t", "Hi", f"{SPACE}Hi", "el"]
MERGES = [["H", "i"], [SPACE, "Hi"], ["e", "l"]]


def sentencepiece(special: list[str], *, bos: str, prefix: bool, **parts: Any) -> Callable[[dict[str, Any]], None]:
    """A change of tokenizer.json to pieces and bytes, as converters of SentencePiece's models write it.

    `prefix`: a space stands before a text. `parts`: others than Llama 2's own.
    """
    words = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepended = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    stripped = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    numbers = {content: number for number, content in enumerate(words)}
    one = [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    document = {
        "added_tokens": [{"id": numbers[content], **token(content)} for content in special],
        "normalizer": {"type": "Sequence", "normalizers": [*prepended, replaced]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *stripped]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": one,
            "pair": [*one, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {bos: {"id": bos, "ids": [numbers[bos]], "tokens": [bos]}},
        },
        "model": {
            "type": "BPE",
            "vocab": numbers,
            "merges": MERGES,
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
        },
        **parts,
    }
    return lambda whole: whole.update(document)


def as_hub_cache(folder: Path) -> Path:
    """The same files as the cache of a hub has them: links of a snapshot to blobs."""
    root = folder.parent / f"models--{folder.name}"
    snapshot, blobs = root / "snapshots" / "0a1b2c", root / "blobs"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.move(file, blobs / f"{number:040x}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{number:040x}")
    return snapshot


def as_volume(folder: Path) -> Path:
    """The same files in a folder of a volume, which has others."""
    root = folder.parent / f"volume-{folder.name}"
    (root / "lost+found").mkdir(parents=True)
    shutil.move(folder, root / "models" / "name")
    return root / "models" / "name"
