"""Command-line parsing whose errors are one sentence instead of the usage text."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any, NoReturn

from millstream_runtime.errors import InvalidConfigError


class CommandLineParser(argparse.ArgumentParser):
    """An ArgumentParser that raises InvalidConfigError, which the dispatcher prints before it exits with 2."""

    def error(self, message: str) -> NoReturn:
        raise InvalidConfigError(f"{message} (see `{self.prog} --help`).")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse, which says of a misspelled flag that the right one is missing, where that one is required."""
        words = list(sys.argv[1:] if args is None else args)
        has_commands = any(isinstance(action, argparse._SubParsersAction) for action in self._actions)
        if not has_commands and (unknown := self._unknown_flags(words)):
            self.error(f"unrecognized arguments: {', '.join(unknown)}{did_you_mean(unknown[0], self._flags())}")
        return super().parse_known_args(args, namespace)

    def _unknown_flags(self, words: Sequence[str]) -> list[str]:
        """Words that begin as a flag does and name none; behind `--` there are only arguments."""
        before = words[: words.index("--")] if "--" in words else words
        return [word for word in before if word.startswith("--") and word.partition("=")[0] not in self._flags()]

    def _flags(self) -> list[str]:
        return [flag for flag in self._option_string_actions if flag.startswith("--")]

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """As argparse, which before Python 3.13 gives the flag of `--flag=--` an empty list, whatever its type."""
        if action.option_strings and "--" in arg_strings:
            self.error(f"argument {'/'.join(action.option_strings)}: expected a value, got '--'")
        return super()._get_values(action, arg_strings)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean serve?` for a word that is close to a known one, else nothing."""
    close = difflib.get_close_matches(word.partition("=")[0], list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def words_of(choices: Iterable[StrEnum]) -> list[str]:
    """The values, as argparse should show them: of the members of an enum it shows the repr."""
    return [choice.value for choice in choices]
