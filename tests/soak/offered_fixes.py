"""`python -m tests.soak.offered_fixes`: apply every fix that is offered for generated infeasible specs.

In a simulated cluster, so it needs no Go tools and no second machine. The result is written to
tests/soak/results/offered_fixes.json, unless --dry. Exit status 1: an offered fix is not applied.
"""

from __future__ import annotations

import argparse
import asyncio
import time

from tests.soak import results
from tests.support.fix_trials import try_offered_fixes


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.offered_fixes", description=__doc__)
    parser.add_argument("--specs", type=int, default=240, help="infeasible specs (default 240)")
    parser.add_argument("--seed", type=int, default=1, help="of the generator (default 1)")
    parser.add_argument("--dry", action="store_true", help="write no result")
    options = parser.parse_args()
    began = time.monotonic()
    trials = asyncio.run(try_offered_fixes(options.seed, options.specs))
    if not options.dry:
        command = f"python -m tests.soak.offered_fixes --specs {options.specs} --seed {options.seed}"
        results.write("offered_fixes", command, time.monotonic() - began, trials.as_dict(), trials.failures)
    print("\n".join([trials.table(), *trials.failures]))
    return 1 if trials.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
