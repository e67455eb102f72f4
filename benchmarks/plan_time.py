"""`python -m benchmarks.plan_time`: how long one plan takes on a cluster of a thousand GPU nodes.

Every node gets a part of the catalogue and a number of free GPUs at random (seeded), so that there are as many kinds of
nodes as a cluster could have. The time is that of `decide`; reading the node objects is printed beside it.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from millstream_operator.catalog.gpu import load_catalog
from millstream_operator.inventory.nodes import inventory_from_nodes
from millstream_operator.planning.planner import decide
from tests.unit.operator.planning.cases import CASES, DEFAULTS

NODES, ROUNDS = 1000, 30
CATALOG = load_catalog()
RESULT = Path(__file__).parent / "results" / "plan_time.json"


def nodes() -> list[dict[str, Any]]:
    """Node objects as the API server has them, as far as planning reads them."""
    draw = random.Random(0)
    parts = [part for part in CATALOG if part.unsupported is None]
    found = []
    for number in range(NODES):
        part = draw.choice(parts)
        found.append(
            {
                "kind": "Node",
                "metadata": {"name": f"n{number}", "labels": {"nvidia.com/gpu.product": part.product_labels[0]}},
                "status": {"allocatable": {"nvidia.com/gpu": str(draw.randint(1, part.gpus_per_node))}},
            }
        )
    return found


def main() -> None:
    """Print one line a case and keep the numbers."""
    listed, results = nodes(), []
    for name, case in CASES.items():
        deployment, reading, planning = case.deployment(), [], []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            facts = replace(case.facts(), inventory=inventory_from_nodes(CATALOG, listed))
            read = time.perf_counter()
            found = decide(deployment, DEFAULTS, facts)
            reading.append((read - began) * 1000)
            planning.append((time.perf_counter() - read) * 1000)
        result = {
            "case": name,
            "summary": found.summary,
            "plan_milliseconds_median": round(statistics.median(planning), 1),
            "plan_milliseconds_worst": round(max(planning), 1),
            "nodes_milliseconds_median": round(statistics.median(reading), 1),
        }
        results.append(result)
        print(f"{result['plan_milliseconds_median']:8.1f} ms  {name}: {found.summary}", flush=True)
    RESULT.write_text(json.dumps({"nodes": NODES, "rounds": ROUNDS, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
