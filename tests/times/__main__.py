"""Print where the time of the last run went, or compare two runs.

python -m tests.times                                # the last run of each tier: the ten largest
python -m tests.times compare BEFORE.json AFTER.json # two files `.tools/test-times.json`, for each tier of both
python -m tests.times compare BEFORE.json AFTER.json --tiers whole sample
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.times.file import TIMES_FILE, TimesByTier, TimesError, read_times
from tests.times.report import LARGEST, compared, largest


def main() -> int:
    arguments = _arguments()
    try:
        if arguments.command == "compare":
            return _compare(arguments)
        return _print_largest(read_times(arguments.file), arguments)
    except TimesError as error:
        print(f"test times: {error}", file=sys.stderr)
        return 2


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.times", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--file", type=Path, default=TIMES_FILE, help="whose times; default: this checkout's last run")
    parser.add_argument("--count", type=int, default=LARGEST, help=f"rows of each table; default: {LARGEST}")
    commands = parser.add_subparsers(dest="command")
    compare = commands.add_parser("compare", help="two files side by side")
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)
    compare.add_argument("--tiers", nargs=2, metavar=("BEFORE", "AFTER"), help="default: each tier that both have")
    return parser.parse_args()


def _print_largest(times_by_tier: TimesByTier, arguments: argparse.Namespace) -> int:
    if not times_by_tier:
        print(f"test times: {arguments.file} does not exist: `make test` writes it", file=sys.stderr)
        return 2
    for tier, times in times_by_tier.items():
        print(f"== {tier}\n\n{largest(times, arguments.count)}\n")
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    before, after = read_times(arguments.before), read_times(arguments.after)
    pairs = [tuple(arguments.tiers)] if arguments.tiers else [(tier, tier) for tier in before if tier in after]
    missing = [
        f"{path} has no tier {tier}; it has: {', '.join(times) or 'none'}"
        for path, times, place in ((arguments.before, before, 0), (arguments.after, after, 1))
        for tier in {pair[place] for pair in pairs} - set(times)
    ]
    if missing or not pairs:
        raise TimesError("; ".join(missing) or f"{arguments.before} and {arguments.after} have no tier in common")
    for old, new in pairs:
        print(f"== {old} -> {new}\n\n{compared(before[old], after[new], arguments.count)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
