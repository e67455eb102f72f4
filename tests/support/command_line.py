"""The configuration that a `millstream serve` command line asks for."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.commands.serve import config_of, parse_command_line
from millstream_runtime.config import RuntimeConfig


def config_from_command_line(argv: Sequence[str]) -> RuntimeConfig:
    return config_of(parse_command_line(argv))
