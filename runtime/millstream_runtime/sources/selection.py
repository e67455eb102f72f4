"""Which files of a model repository a server needs. Pure.

    config.json, generation_config.json, tokenizer*.json, *.jinja, vocabulary    yes
    additional_chat_templates/*.jinja                                           yes
    the shards that model.safetensors.index.json names, else model.safetensors,
    else every *.safetensors, else the one *.gguf with all its parts            yes
    *.bin, *.pt, *.py, other folders (original/, onnx/), hidden files            never

An allow list, because a pickle or a .py file can run arbitrary code. Choosing by the index also leaves out the second
copy of the weights that many repositories carry (`consolidated.safetensors`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.gguf.gguf_model import gguf_files_of, gguf_model_names

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
NO_INDEX = "is not a JSON object with weight_map, which maps names of tensors to files; fetch the file again"
GGUF_SUFFIX = ".gguf"
SUPPORT_PATTERNS = ("*.json", "*.jinja", "*.tiktoken", "tokenizer.model", "spiece.model", "vocab.txt", "merges.txt")
TEMPLATE_FOLDER = "additional_chat_templates"  # the one folder of support files: named templates, as of `transformers`
TEMPLATE_PATTERN = "*.jinja"
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.msgpack", "*.h5")
SUPPORT_LIMIT_BYTES = 256 << 20  # the largest tokenizer.json in use is about a tenth of this
MAX_SHARDS = 2000


def is_support_file(name: str) -> bool:
    """Whether `name` is configuration, tokenizer or chat template: a plain name, or one in TEMPLATE_FOLDER."""
    folder, slash, plain = name.rpartition("/")
    if slash:
        return folder == TEMPLATE_FOLDER and _is_plain(plain) and fnmatchcase(plain, TEMPLATE_PATTERN)
    return _is_plain(name) and any(fnmatchcase(name, pattern) for pattern in SUPPORT_PATTERNS)


def name_in_model(path: PurePosixPath, folder: PurePosixPath) -> str | None:
    """The name of a file of the model that lies in `folder`; None for files elsewhere, and in other folders of it."""
    if path.parent == folder:
        return path.name
    is_template = path.parent == folder / TEMPLATE_FOLDER and is_support_file(f"{TEMPLATE_FOLDER}/{path.name}")
    return f"{TEMPLATE_FOLDER}/{path.name}" if is_template else None


def is_weights_file(name: str) -> bool:
    """Whether `name` (no folders) holds tensors that cannot run code."""
    return _is_plain(name) and name.endswith((".safetensors", GGUF_SUFFIX))


def support_files(names: Collection[str], where: str) -> list[str]:
    """Configuration and tokenizer. Raises RuntimeFailure: CheckpointInvalid, neither config.json nor a GGUF file."""
    chosen = sorted(name for name in names if is_support_file(name))
    if CONFIG_NAME not in chosen and not gguf_files_of(names, where):
        raise invalid(f"{where} has no {CONFIG_NAME}; name a model in the Hugging Face layout.")
    return chosen


def weights_files(names: Collection[str], index: bytes | None, where: str) -> list[str]:
    """The files that hold the weights; `index` is the content of model.safetensors.index.json where there is one.

    Raises:
        RuntimeFailure: CheckpointInvalid: none, only pickles, or an index that names a missing file.
    """
    if index is not None:
        shards = read_index(index, where)
        if missing := sorted(shards - set(names)):
            raise invalid(f"{where}: {INDEX_NAME} names {missing[0]}, which is not there.")
        return sorted(shards)
    if SINGLE_NAME in names:
        return [SINGLE_NAME]
    if found := gguf_files_of(names, where):
        return found
    if found := sorted(name for name in names if is_weights_file(name) and not name.endswith(GGUF_SUFFIX)):
        return found
    pickles = sorted(name for name in names if any(fnmatchcase(name, pattern) for pattern in PICKLE_PATTERNS))
    if pickles:
        raise invalid(f"{where} has only pickled weights ({pickles[0]}), which can run code; convert to safetensors.")
    raise invalid(f"{where} has no *.safetensors and no *.gguf file.")


def gguf_files_of_variant(paths: Collection[str], variant: str, where: str) -> set[str]:
    """The GGUF files whose path has this word, such as Q4_K_M; case does not matter.

    Those of the top level come first. A large quantization often lies in a folder: then all are of one folder.

    Raises:
        RuntimeFailure: CheckpointInvalid, there is none, or several folders have one; the message names them.
    """
    word = re.compile(rf"(?<![A-Za-z0-9]){re.escape(variant)}(?![A-Za-z0-9_])", re.IGNORECASE)
    by_folder = gguf_files_by_folder(paths)
    listed = [path for folder in sorted(by_folder) for path in by_folder[folder]]
    chosen = {
        folder: {path for path in files if word.search(path.removesuffix(GGUF_SUFFIX))}
        for folder, files in by_folder.items()
    }
    folders = sorted(folder for folder, files in chosen.items() if files)
    if not folders:
        raise invalid(
            f"{where} has no {variant} among its {len(listed)} GGUF files ({', '.join(listed[:8])}"
            f"{', …' if len(listed) > 8 else ''}); name one of them as org/name:VARIANT."
        )
    if len(folders) > 1 and folders[0] != "":
        raise invalid(
            f"{where} has {variant} in {len(folders)} folders ({', '.join(folders[:8])}); name one of them as "
            "org/name:VARIANT, by a word that the others have not."
        )
    return chosen[folders[0]]


def gguf_files_by_folder(paths: Collection[str]) -> dict[str, list[str]]:
    """Paths of the GGUF files of models by the folder that holds them; "" is the top level."""
    names: dict[str, list[str]] = {}
    for path in paths:
        folder, _, name = path.rpartition("/")
        is_hidden = any(part.startswith(".") for part in PurePosixPath(folder).parts)
        if name.endswith(GGUF_SUFFIX) and is_weights_file(name) and not is_hidden:
            names.setdefault(folder, []).append(name)
    return {
        folder: [f"{folder}/{name}" if folder else name for name in models]
        for folder, listed in names.items()
        if (models := gguf_model_names(listed))
    }


def gguf_only_in_folders(paths: Collection[str], where: str) -> RuntimeFailure | None:
    """The failure of a source whose models are GGUF files in folders alone, of which none was named."""
    by_folder = gguf_files_by_folder(paths)
    if not by_folder or any("/" not in path and is_weights_file(path) for path in paths):
        return None
    shown = sorted(by_folder)
    return invalid(
        f"{where} has its GGUF files in folders ({', '.join(shown[:8])}{', …' if len(shown) > 8 else ''}); name one of "
        "them as org/name:VARIANT, by a word of its name."
    )


def read_index(index: bytes, where: str) -> set[str]:
    """The shards that an index names, each a plain file name."""
    try:
        names = set(json.loads(index)["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise invalid(f"{where}: {INDEX_NAME} {NO_INDEX}.") from None
    if not names or len(names) > MAX_SHARDS:
        raise invalid(f"{where}: {INDEX_NAME} names {len(names)} files; it must name 1 to {MAX_SHARDS}.")
    for name in names:
        if not isinstance(name, str) or not is_weights_file(name) or name.endswith(GGUF_SUFFIX):
            raise invalid(
                f"{where}: {INDEX_NAME} names {name!r}; a shard must be a *.safetensors file in the same folder."
            )
    return names


def safe_relative_path(name: str) -> PurePosixPath | None:
    """`name` as a path below some folder, `./` dropped; None when it is absolute, climbs out or cannot be a name."""
    path = PurePosixPath(name)
    bad = path.is_absolute() or "\\" in name or "\0" in name or not path.parts
    if bad or any(part == ".." or len(part.encode(errors="replace")) > 255 for part in path.parts):
        return None
    return path


def invalid(message: str) -> RuntimeFailure:
    """The failure of a checkpoint that another download does not repair."""
    return RuntimeFailure(FailureReason.CHECKPOINT_INVALID, message)


def _is_plain(name: str) -> bool:
    """A visible name without a folder, fit to be created here: never `.millstream-complete.json`, never `../x`."""
    return 0 < len(name) <= 200 and name.isprintable() and not name.startswith(".") and not set(name) & {"/", "\\"}
