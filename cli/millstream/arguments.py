"""Command-line parsing that ends in one sentence, not in a usage dump."""

from __future__ import annotations

import argparse
from typing import NoReturn

from millstream_runtime.errors import InvalidConfigError


class CommandLineParser(argparse.ArgumentParser):
    """argparse whose errors are InvalidConfigError: the dispatcher prints them and exits 2."""

    def error(self, message: str) -> NoReturn:
        raise InvalidConfigError(f"{message} (see `{self.prog} --help`).")
