"""Command-line parsing whose errors are one sentence instead of the usage text."""

from __future__ import annotations

import argparse
from typing import NoReturn

from millstream_runtime.errors import InvalidConfigError


class CommandLineParser(argparse.ArgumentParser):
    """An ArgumentParser that raises InvalidConfigError, which the dispatcher prints before it exits with 2."""

    def error(self, message: str) -> NoReturn:
        raise InvalidConfigError(f"{message} (see `{self.prog} --help`).")
