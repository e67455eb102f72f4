"""Objects as an earlier version stored them: made while the CRD lacks the rules that hold for new objects alone."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from e2e.cluster import Cluster, Object
from e2e.leftovers import CRD, rules, set_rules


@contextmanager
def without_new_rules(cluster: Cluster) -> Iterator[None]:
    """The CRD without the rules that hold for new objects alone."""
    every = rules(cluster.get("crd", CRD))
    assert [rule for rule in every if rule.get("optionalOldSelf")], "the API server keeps the field"
    set_rules(cluster, [rule for rule in every if not rule.get("optionalOldSelf")])
    try:
        yield
    finally:
        set_rules(cluster, every)


def is_applied(cluster: Cluster, namespace: str, manifest: Object) -> bool:
    """Try to store it: the API server takes a moment to follow its CRD."""
    done = cluster.run("kubectl", "apply", "-n", namespace, "-f", "-", stdin=json.dumps(manifest), check=False)
    return done.returncode == 0


def dry_run(cluster: Cluster, namespace: str, manifest: Object) -> subprocess.CompletedProcess[str]:
    """What the API server says of it; nothing is stored."""
    arguments = ("apply", "-n", namespace, "--dry-run=server", "-f", "-")
    return cluster.run("kubectl", *arguments, stdin=json.dumps(manifest), check=False)
