"""Command-line parsing whose errors are one sentence instead of the usage text."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from enum import StrEnum
from typing import Any, NoReturn

from millstream_runtime.errors import InvalidConfigError


class CommandLineParser(argparse.ArgumentParser):
    """An ArgumentParser that raises InvalidConfigError, which the dispatcher prints before it exits with 2."""

    def error(self, message: str) -> NoReturn:
        raise InvalidConfigError(f"{message} (see `{self.prog} --help`).")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """As argparse, which before Python 3.13 gives the flag of `--flag=--` an empty list, whatever its type."""
        if action.option_strings and "--" in arg_strings:
            self.error(f"argument {'/'.join(action.option_strings)}: expected a value, got '--'")
        return super()._get_values(action, arg_strings)


def words_of(choices: Iterable[StrEnum]) -> list[str]:
    """The values, as argparse should show them: of the members of an enum it shows the repr."""
    return [choice.value for choice in choices]
