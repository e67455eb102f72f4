"""Random clusters: what this version cannot run is never chosen while something else helps; more GPUs never hurt, and
the cheapest product that will do is chosen.

`python -m tests.soak.random_clusters` tries 500; here is a sample with other seeds.
"""

from __future__ import annotations

import pytest

from tests.support.cluster_trials import try_cluster
from tests.support.random_clusters import random_cluster

SEEDS = range(10_000, 10_012)


@pytest.mark.parametrize("seed", SEEDS)
def test_more_gpus_never_hurt_and_what_runs_comes_first(seed: int) -> None:
    assert try_cluster(random_cluster(seed)).problems == []
