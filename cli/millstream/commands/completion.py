"""Print the script by which a shell completes commands, flags and their values.

source <(millstream completion bash)          in ~/.bashrc, or zsh in ~/.zshrc after compinit
millstream completion fish | source           in ~/.config/fish/config.fish
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

from millstream.arguments import CommandLineParser
from millstream.completion import SCRIPTS, command_words


def run(argv: Sequence[str]) -> int:
    """Print the script; 0."""
    from millstream.cli import COMMANDS

    given = command_parser().parse_args(list(argv))
    words = [
        command_words(name, help_text, importlib.import_module(module).command_parser())
        for name, (module, help_text) in COMMANDS.items()
    ]
    print(SCRIPTS[given.shell](words), end="")
    return 0


def command_parser() -> CommandLineParser:
    """Return the flags of the command."""
    parser = CommandLineParser(
        prog="millstream completion",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=tuple(SCRIPTS), help="whose script to print")
    return parser
