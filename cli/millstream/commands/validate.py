"""Check LLMDeployment files as the API server would, without an API server."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from millstream.arguments import CommandLineParser
from millstream.manifest import manifest_checker


def run(argv: Sequence[str]) -> int:
    """Print `FILE: ok` on stdout, or all errors of the file on stderr, one per line. 0 if all are valid, else 1."""
    files = command_parser().parse_args(list(argv)).files
    errors_of = manifest_checker()
    failures = 0
    for file in files:
        if errors := errors_of(file):
            failures += 1
            print("\n".join(errors), file=sys.stderr)
        else:
            print(f"{file}: ok")
    return 1 if failures else 0


def command_parser() -> CommandLineParser:
    """Return the flags of the command."""
    parser = CommandLineParser(prog="millstream validate", allow_abbrev=False, description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="YAML file with LLMDeployments")
    return parser
