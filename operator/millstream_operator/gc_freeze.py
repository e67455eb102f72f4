"""Python's cycle collector, told what it need not look at: modules, schemas and what the first listing brought.

A full collection walks through all of it and never finds anything there: manifests have no cycles, and are freed by
their counts when they are replaced. One in the middle of a plan on a thousand nodes makes it the slowest of all
(`python -m benchmarks.plan_time`).
"""

from __future__ import annotations

import gc


def freeze_gc() -> None:
    """What lives now is never looked at again."""
    gc.collect()
    gc.freeze()
