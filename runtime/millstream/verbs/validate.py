"""`millstream validate FILE...`: the API server's own complaints, without an API server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from millstream.manifest import ManifestError, require_loader
from millstream_runtime.config import CommandLineParser


def run(argv: Sequence[str]) -> int:
    """One line a file: `FILE: ok` on stdout, or what is wrong on stderr. 0 when every file is right, else 1."""
    files = _parser().parse_args(list(argv)).files
    load_manifest = require_loader()
    failures = 0
    for file in files:
        try:
            load_manifest(file)
        except ManifestError as error:
            failures += 1
            print(error, file=sys.stderr)
        else:
            print(f"{file}: ok")
    return 1 if failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandLineParser(prog="millstream validate", allow_abbrev=False, description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="YAML file with one LLMDeployment")
    return parser
