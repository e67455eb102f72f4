"""The configuration as two files: boot.json is read once, live.json again whenever it changes.

    operator: dump(config)  ->  ConfigMap  ->  kubelet  ->  read_boot(path), parse_live(text)  :runtime

An unknown field in a boot file is an error, because this version could not honour it. A live file may have unknown
fields, because an operator that is newer than the pinned runtime may write it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from millstream_runtime.config import BootConfig, LiveConfig
from millstream_runtime.errors import InvalidConfigError

BOOT_FILE, LIVE_FILE = "boot.json", "live.json"
# The operator mounts the Secret with the API keys here, as <secret>/<key>: messages name both by the path.
API_KEYS_FOLDER = "/var/run/secrets/millstream/api-keys"
MAX_FILE_BYTES = 1 << 16
MAX_SHOWN_CHARACTERS = 40  # of a wrong value
Half = TypeVar("Half", BootConfig, LiveConfig)


def dump(half: BootConfig | LiveConfig) -> str:
    """Canonical JSON: equal halves give equal text."""
    return dump_fields(half.as_dict())


def dump_fields(fields: dict[str, Any]) -> str:
    """As `dump`, for fields that are a dict already."""
    return json.dumps(fields, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def read_boot(path: Path) -> BootConfig:
    """The boot half of a file.

    Raises:
        InvalidConfigError: the file cannot be read, holds a field that this version does not know, or a value that
            cannot work.
    """
    return parse_boot(read_text(path), path)


def parse_boot(text: str, path: Path) -> BootConfig:
    """As `read_boot`, from the text of a file; `path` names it in errors."""
    return _parse(_strict(BootConfig), text, path)


def parse_live(text: str, path: Path) -> LiveConfig:
    """The live half from the text of a file; fields that this version does not know are ignored.

    Raises:
        InvalidConfigError: the text is not a JSON object, or has a value that cannot work.
    """
    return _parse(TypeAdapter(LiveConfig), text, path)


def read_text(path: Path) -> str:
    """Raises InvalidConfigError: there is no such file, it is too large or is not UTF-8."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise InvalidConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes.")
        return content.decode()
    except OSError as error:
        raise InvalidConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise InvalidConfigError(f"{path} is not UTF-8 text ({error.reason}).") from None


def _strict(half: type[BootConfig]) -> TypeAdapter[BootConfig]:
    return TypeAdapter(with_config(ConfigDict(extra="forbid"))(half))


def _parse(adapter: TypeAdapter[Half], text: str, path: Path) -> Half:
    try:
        return adapter.validate_json(text, strict=True)
    except InvalidConfigError as error:  # of the class itself, in the words of the flags
        raise InvalidConfigError(f"{path}: {error.message}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(step) for step in first["loc"])
        if first["type"] == "unexpected_keyword_argument":
            raise InvalidConfigError(
                f"{path} has a field {where}, which this version of the runtime does not know; use the image that "
                "belongs to the operator, or leave out the spec's field that asks for it."
            ) from None
        got = f"; got {first['input']!r}" if where and len(repr(first["input"])) <= MAX_SHOWN_CHARACTERS else ""
        raise InvalidConfigError(f"{path}: {f'{where}: ' if where else ''}{first['msg']}{got}.") from None
