"""Which file of a model folder has the chat template, by the rules of `transformers`.

    additional_chat_templates/default.jinja
    chat_template.jinja
    processor_config.json      "chat_template", of models with a processor, as those with a vision tower have
    chat_template.json         {"chat_template": …}, of such models
    tokenizer_config.json      "chat_template": a text, or several by name, of which "default" is taken
    chat_template.json         of any other model

The first that has one wins. Other named templates (`tool_use`, `rag`) are for requests with tools or documents, which
are not served. Where `transformers` refuses a folder, as its named templates have no default, the next file counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.strict_json import read_strict_json

TEMPLATE = "chat_template"
TEMPLATE_FILE, LEGACY_FILE = "chat_template.jinja", "chat_template.json"
NAMED_DEFAULT_FILE = "additional_chat_templates/default.jinja"
SETTINGS_FILE = "tokenizer_config.json"
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
MAX_FILE_BYTES = 4 << 20  # the longest published template has a fiftieth of this
MAX_NAMED = 8


@dataclass(frozen=True, slots=True)
class TemplateChoice:
    """`source`: the template; None: the folder has none. `file`: where it stands, "" for none.

    `notes`: a sentence for the log about each other file that says something else.
    """

    source: str | None = None
    file: str = ""
    notes: tuple[str, ...] = ()


def choose_template(folder: Path, settings: Mapping[str, Any]) -> TemplateChoice:
    """Choose. `settings`: of tokenizer_config.json.

    Raises:
        RuntimeFailure: CheckpointInvalid, a file of a template cannot be used; the message names it.
    """
    candidates = list(_candidates(folder, settings))
    chosen = next(((file, source) for file, source in candidates if isinstance(source, str)), None)
    if chosen is None:
        return TemplateChoice(notes=tuple(_no_default(file, source) for file, source in candidates))
    file, source = chosen
    others = [other for other, text in candidates if isinstance(text, str) and text.strip() != source.strip()]
    return TemplateChoice(
        source, file, tuple(f"{other} has another chat template than {file}, which counts" for other in others)
    )


def _candidates(folder: Path, settings: Mapping[str, Any]) -> Iterator[tuple[str, str | list[str]]]:
    """File and template of each file that has one, the first one first; names alone where none is the default."""
    for name in (NAMED_DEFAULT_FILE, TEMPLATE_FILE):
        if (source := _read(folder, name)) is not None:
            yield name, _filled(source, folder / name)
    legacy = [(LEGACY_FILE, template) for template in _of_legacy(folder)]
    if "processor_class" in settings or any((folder / name).is_file() for name in PROCESSOR_FILES):
        processor = _json(folder, PROCESSOR_FILES[0])
        yield from ((PROCESSOR_FILES[0], template) for template in _templates(processor, folder / PROCESSOR_FILES[0]))
        yield from legacy
        legacy = []
    yield from ((SETTINGS_FILE, template) for template in _templates(settings, folder / SETTINGS_FILE))
    yield from legacy


def _of_legacy(folder: Path) -> list[str | list[str]]:
    path = folder / LEGACY_FILE
    values = _json(folder, LEGACY_FILE)
    if values is None:
        return []
    if values.get(TEMPLATE) in (None, ""):
        raise _invalid(f'{path} must be an object with the chat template in "{TEMPLATE}"; correct or delete it.')
    return [_filled(template, path) if isinstance(template, str) else template for template in _templates(values, path)]


def _templates(values: Mapping[str, Any] | None, path: Path) -> list[str | list[str]]:
    """The default template of a file, or the names of those that it has; nothing where it has none."""
    template = None if values is None else values.get(TEMPLATE)
    if template is None or template == "":
        return []
    if isinstance(template, str):
        return [template]
    if isinstance(template, list):  # older folders hold several by name
        entries = [entry for entry in template if isinstance(entry, dict)]
        template = {entry["name"]: entry.get("template") for entry in entries if isinstance(entry.get("name"), str)}
    if not isinstance(template, dict) or not isinstance(template.get("default", ""), str):
        raise _invalid(f'{path}: {TEMPLATE} must be a text, or texts by name, as {{"default": "…"}}; correct it.')
    return [template["default"]] if "default" in template else [sorted(map(str, template))]


def _no_default(file: str, names: str | list[str]) -> str:
    return f"{file} has no chat template with the name default, but {', '.join(names[:MAX_NAMED])}: chats are refused"


def _filled(source: str, path: Path) -> str:
    if not source.strip():
        raise _invalid(f"{path} has an empty chat template; write the template there, or delete the file.")
    return source


def _json(folder: Path, name: str) -> Mapping[str, Any] | None:
    text = _read(folder, name)
    if text is None:
        return None
    try:
        values = read_strict_json(text)
    except ValueError as error:
        raise _invalid(f"{folder / name} is not readable JSON: {_one_line(error)}.") from error
    if not isinstance(values, dict):
        raise _invalid(f"{folder / name} must hold a JSON object.")
    return values


def _read(folder: Path, name: str) -> str | None:
    """The text of a file; None where there is none."""
    path = folder / name
    if not path.exists() and not path.is_symlink():
        return None
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise _invalid(f"{path} has more than {MAX_FILE_BYTES >> 20} MiB, which no chat template has; replace it.")
        return content.decode()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise _invalid(f"{path} is not readable text: {_one_line(reason)}.") from error


def _one_line(reason: object) -> str:
    return (str(reason).splitlines() or [type(reason).__name__])[0].rstrip(".")[:300]


def _invalid(message: str) -> RuntimeFailure:
    return RuntimeFailure(FailureReason.CHECKPOINT_INVALID, message)
