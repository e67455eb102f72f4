"""`python -m tests.soak.random_clusters`: plan for random clusters, and for each with a node more and a pod less.

Prints a line for each plan that this version cannot apply beside one that it can, and for each plan or fix that is lost
by more GPUs. Exit status 1: there is such a line.
"""

from __future__ import annotations

import argparse
from collections import Counter

from tests.support.cluster_trials import Trial, try_cluster
from tests.support.random_clusters import random_cluster


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.random_clusters", description=__doc__)
    parser.add_argument("--clusters", type=int, default=500, help="how many (default 500)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first (default 0)")
    options = parser.parse_args()
    trials: list[Trial] = []
    for seed in range(options.first, options.first + options.clusters):
        trials.append(try_cluster(random_cluster(seed)))
        print(*trials[-1].problems, sep="\n", end="\n" if trials[-1].problems else "", flush=True)
    outcomes = Counter(trial.outcome for trial in trials)
    problems = sum(len(trial.problems) for trial in trials)
    print(f"{len(trials)} clusters, {sum(trial.changes for trial in trials)} changes: {dict(sorted(outcomes.items()))}")
    print(f"problems: {problems}")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
