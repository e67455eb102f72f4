"""What the commands that make a model folder have in common: `quantize` and `tune-draft`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from millstream.arguments import CommandLineParser
from millstream.stage_progress import StageProgress
from millstream.termination import unwind_on_sigterm
from millstream_runtime.errors import InvalidConfigError

EXIT_INTERRUPTED = 130
Made = TypeVar("Made")
Number = int | float


def making_parser(command: str, description: str | None) -> CommandLineParser:
    """Return a parser without flags. `description`: the module's docstring."""
    return CommandLineParser(
        prog=f"millstream {command}",
        allow_abbrev=False,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_output_flags(parser: CommandLineParser, *, keep_made: str) -> None:
    """Add the flags of the folder to make. `keep_made`: what that flag does, in the words of the command."""
    flag = parser.add_argument
    flag("--out", type=Path, required=True, metavar="DIR", help="folder to make; it must not exist, or be empty")
    flag("--keep-made", action="store_true", help=keep_made)
    flag(
        "--discard-other-work",
        action="store_true",
        help="remove what an interrupted run for --out left, if its inputs were others",
    )


def add_run_flags(parser: CommandLineParser, *, seed: str) -> None:
    """Add the flags of how it is computed. `seed`: what follows from the seed."""
    flag = parser.add_argument
    flag("--seed", type=int, default=0, metavar="N", help=f"{seed} (default: 0)")
    flag("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: CUDA where there is one")


def require_ranges(ranges: Iterable[tuple[str, Number | None, Number, Number]]) -> None:
    """Check flag, value, least and largest, of each flag that is given.

    Raises:
        InvalidConfigError: a value is outside.
    """
    for flag, value, low, high in ranges:
        if value is not None and not low <= value <= high:
            raise InvalidConfigError(f"{flag} is {value}; it must be {low} to {high}.")


def require_outside(out: Path, *sources: Path) -> None:
    """Check that `out` is none of the folders that are read, and in none of them, and that all can be opened.

    Raises:
        InvalidConfigError: it is.
    """
    for path in (out, *sources):
        if str(path).encode(errors="replace").decode() != str(path):
            raise InvalidConfigError(
                f"The name {path} has bytes that are no UTF-8, and the safetensors library opens no such file; give "
                "another name."
            )
    try:
        place = out.resolve()
    except (OSError, RuntimeError):  # RuntimeError: Python's for a circle of links
        raise InvalidConfigError(f"--out {out} cannot be used: its symbolic links lead in a circle.") from None
    for source in sources:
        if source.is_dir() and place.is_relative_to(source.resolve()):
            raise InvalidConfigError(f"--out {out} is in the folder {source}, which is read; give another place.")


def run_resumable(make: Callable[[StageProgress], Made], out: Path, interrupted: str) -> Made | int:
    """Return what `make` makes in `out`, or EXIT_INTERRUPTED after Ctrl-C. `interrupted`: how to go on.

    Raises:
        SystemExit: the process was stopped by SIGTERM.
    """
    unwind_on_sigterm()
    progress = StageProgress()
    progress.serve_in_a_pod()
    try:
        return make(progress)
    except KeyboardInterrupt:
        progress.close()
        print(f"millstream: interrupted; {_how_to_go_on(out, interrupted)}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except SystemExit:
        progress.close()
        print(f"millstream: stopped by SIGTERM; {_how_to_go_on(out, interrupted)}", file=sys.stderr)
        raise
    finally:
        progress.close()


def _how_to_go_on(out: Path, interrupted: str) -> str:
    """A run that is stopped behind the rename, while it removes its work, has made the folder."""
    if out.is_dir() and any(out.iterdir()):
        return f"{out} is there; the same command with --keep-made takes it and removes what is left of the work"
    return interrupted
