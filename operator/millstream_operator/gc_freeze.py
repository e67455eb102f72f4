"""Exclude long-lived objects from Python's cycle collector: modules, schemas and the first listing.

A full collection walks through all of them and never frees any: manifests have no cycles, and reference counting frees
them when they are replaced. A collection during a plan on a thousand nodes makes it the slowest of all
(`python -m benchmarks.plan_time`).
"""

from __future__ import annotations

import gc


def freeze_gc() -> None:
    """Exclude all objects that live now from later collections."""
    gc.collect()
    gc.freeze()
