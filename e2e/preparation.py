"""What happens once before the tests of a run, in the process that starts the others: lock, cleaning, installation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

import pytest

from e2e.cluster import Cluster, refusal_of
from e2e.durations import Durations
from e2e.guard import Guard
from e2e.leftovers import delete_leftovers, restore_crd
from e2e.release import ManagedRelease
from e2e.run_lock import AnotherRunError, hold, lock_file

# Not 1, which says that tests failed: `make e2e` then still runs the other lane.
CANNOT_RUN = 4
IMAGE_NAMES = ("operator", "runtime")


@dataclass(frozen=True, slots=True)
class Files:
    """What a run needs to know where the cluster and the images are."""

    kubeconfig: Path
    images: Path
    tools: Path

    def open_cluster(self) -> Cluster:
        """The cluster, which refuses what a test has no mark for.

        Raises:
            pytest.exit.Exception: it is not there, or not made for tests.
        """
        if not self.kubeconfig.is_file():
            cannot_run(f"{self.kubeconfig} is missing: run `make cluster-up`, or give --kubeconfig.")
        cluster = Cluster(self.kubeconfig.resolve(), self.tools, Guard())
        if refusal := refusal_of(cluster):
            cannot_run(f"{self.kubeconfig}: {refusal}")
        cluster.read_kinds()
        return cluster

    def release(self, cluster: Cluster) -> ManagedRelease:
        """The release of the images under test, whether it is installed or not.

        Raises:
            pytest.exit.Exception: the file of images is missing or damaged.
        """
        if not self.images.is_file():
            cannot_run(f"{self.images} is missing: run `make images`, or give --images.")
        try:
            images: Mapping[str, str] = json.loads(self.images.read_text(encoding="utf-8"))
            return ManagedRelease(cluster, *(images[name] for name in IMAGE_NAMES))
        except (ValueError, KeyError, TypeError):
            cannot_run(f"{self.images} does not name the images {' and '.join(IMAGE_NAMES)}: run `make images`.")


def prepare(cluster: Cluster, release: ManagedRelease, kubeconfig: Path, durations: Durations) -> IO[str] | None:
    """Lock the cluster, delete what an interrupted run left, and install the operator; returns the lock to keep.

    Raises:
        pytest.exit.Exception: another run is under way, or the operator does not start.
    """
    lock = _lock(kubeconfig)
    with cluster.guard.opened():
        delete_leftovers(cluster)
        try:
            with durations.measure("helm upgrade --install"):
                release.install()
        except AssertionError as error:  # every test would wait for it and fail
            cannot_run(f"The operator does not start.\n{error}\n{release.logs()}")
        restore_crd(cluster)
    return lock


def _lock(kubeconfig: Path) -> IO[str] | None:
    try:
        return hold(lock_file(kubeconfig))
    except AnotherRunError as error:
        cannot_run(str(error))
    except OSError as error:
        print(f"two runs at once would not notice each other: {error}")
        return None


def cannot_run(reason: str) -> NoReturn:
    """End the run of pytest with one sentence."""
    pytest.exit(reason, returncode=CANNOT_RUN)
