"""Check LLMDeployment files as the API server would, without an API server."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from millstream.arguments import CommandLineParser
from millstream.manifest import manifest_reader
from millstream_runtime.errors import RuntimeFailure


def run(argv: Sequence[str]) -> int:
    """Print one line per file: `FILE: ok` on stdout, or the error on stderr. 0 if every file is valid, else 1."""
    parser = CommandLineParser(prog="millstream validate", allow_abbrev=False, description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="YAML file with one LLMDeployment")
    files = parser.parse_args(list(argv)).files
    read = manifest_reader()
    failures = 0
    for file in files:
        try:
            read(file)
        except RuntimeFailure as failure:
            failures += 1
            print(failure.message, file=sys.stderr)
        else:
            print(f"{file}: ok")
    return 1 if failures else 0
