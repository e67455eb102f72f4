"""`python -m tests.soak.offered_fixes`: apply every fix that is offered for generated infeasible specs.

In a simulated cluster, so it needs no Go tools and no second machine. Exit status 1: an offered fix is not applied.
"""

from __future__ import annotations

import argparse
import asyncio

from tests.support.fix_trials import try_offered_fixes


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.offered_fixes", description=__doc__)
    parser.add_argument("--specs", type=int, default=240, help="infeasible specs (default 240)")
    parser.add_argument("--seed", type=int, default=1, help="of the generator (default 1)")
    options = parser.parse_args()
    trials = asyncio.run(try_offered_fixes(options.seed, options.specs))
    print("\n".join([trials.table(), *trials.failures]))
    return 1 if trials.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
