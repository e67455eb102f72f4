"""RuntimeConfig as command-line flags, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from millstream.arguments import CommandLineParser
from millstream_runtime.config import RuntimeConfig
from millstream_runtime.config_flags import add_config_flags, from_namespace


def to_args(config: RuntimeConfig) -> list[str]:
    """Flags that `from_args` reads back to an equal config. Values that the runtime chooses are left out."""
    return [
        f"--{field.name.replace('_', '-')}={_written(value)}"
        for field in fields(config)
        if (value := getattr(config, field.name)) not in (None, ())
    ]


def _written(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def from_args(argv: Sequence[str]) -> RuntimeConfig:
    """Parse flags as `millstream serve` does; raises InvalidConfigError for a bad one."""
    parser = CommandLineParser(prog="millstream serve", allow_abbrev=False)
    add_config_flags(parser)
    return from_namespace(parser.parse_args(list(argv)))
