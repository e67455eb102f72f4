"""Files next to the weights that a loader or a reader of the model needs: copied from the model it was made from.

A run that goes on needs them as they were, too: the tokens of its data follow from the tokenizer and the chat template.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from millstream_runtime.model_output.resumable_folder import ResumableFolder, writing

COPIED = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
    "processor_config.json", "preprocessor_config.json", "LICENSE",
    "LICENSE.md", "LICENSE.txt", "NOTICE", "USE_POLICY.md",
)  # fmt: skip
NAMED_TEMPLATES = "additional_chat_templates/*.jinja"
MAX_COPIED_BYTES = 256 << 20


def model_files(folder: Path) -> Iterator[Path]:
    """The files of a model folder that may be read, though some may not exist."""
    yield from (folder / name for name in ("config.json", *COPIED))
    for pattern in (NAMED_TEMPLATES, "*.safetensors", "*.safetensors.index.json", "*.gguf"):
        yield from folder.glob(pattern)


def copy_companions(source: Path, work: ResumableFolder) -> None:
    """Copy those that `source` has. Raises RuntimeFailure: DiskFull."""
    for file in _companions(source):
        target = work.model / file.relative_to(source)
        with writing(target):
            target.parent.mkdir(exist_ok=True)
        work.write(target, partial(shutil.copyfile, file))


def companions_digest(source: Path) -> str:
    """Return the SHA-256 of their names and contents, hexadecimal. Files that cannot be read are an OSError."""
    digest = hashlib.sha256()
    for file in _companions(source):
        digest.update(f"{file.relative_to(source)} {hashlib.sha256(file.read_bytes()).hexdigest()} ".encode())
    return digest.hexdigest()


def _companions(source: Path) -> Iterator[Path]:
    for file in (*(source / name for name in COPIED), *sorted(source.glob(NAMED_TEMPLATES))):
        if file.is_file() and file.stat().st_size <= MAX_COPIED_BYTES:
            yield file
