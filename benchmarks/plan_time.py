"""`python -m benchmarks.plan_time`: how long one plan takes on a cluster of a thousand GPU nodes.

Every node gets a part of the catalogue and a number of free GPUs at random (seeded), so that there are as many kinds of
nodes as a cluster could have. The time is that of `decide`; reading the node objects is printed beside it.

Each case is planned as on a laptop, where all GPUs are free, and as in the operator: from its accounts, with pods on
half of the GPUs, so that what is free and what there is are two inventories. Choices that are remembered are forgotten
before each plan, so that every time is that of a first plan. Processor time is given, too: others use machines.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from millstream_operator import gc_freeze
from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.catalog.gpu import load_catalog
from millstream_operator.inventory.accounts import GpuAccounts
from millstream_operator.inventory.nodes import inventory_from_nodes, read_node
from millstream_operator.inventory.pods import GpuPod
from millstream_operator.planning.choices.placement import choose_placement
from millstream_operator.planning.facts import Facts
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


def accounts(listed: list[dict[str, Any]]) -> GpuAccounts:
    """What the operator keeps: the nodes, and pods of others on about half of their GPUs."""
    draw, found = random.Random(1), GpuAccounts(CATALOG)
    for node in filter(None, map(read_node, listed)):
        found.put_node(node.name, node)
        if held := draw.randint(0, node.gpus):
            found.put_pod(node.name, GpuPod(node.name, node.name, held, None, ""))
    return found


def timed(prepare: Callable[[], Facts], deployment: LLMDeployment) -> tuple[dict[str, Any], str]:
    """Milliseconds of a first plan and of its facts; and what was planned."""
    reading, planning, computing, summary = [], [], [], ""
    for _ in range(ROUNDS):
        choose_placement.cache_clear()
        began = time.perf_counter()
        facts = prepare()
        read, used = time.perf_counter(), time.process_time()
        summary = decide(deployment, DEFAULTS, facts).summary
        planning.append((time.perf_counter() - read) * 1000)
        computing.append((time.process_time() - used) * 1000)
        reading.append((read - began) * 1000)
    return {
        "plan_milliseconds_median": round(statistics.median(planning), 1),
        "plan_milliseconds_worst": round(max(planning), 1),
        "plan_processor_milliseconds_worst": round(max(computing), 1),
        "facts_milliseconds_median": round(statistics.median(reading), 1),
    }, summary


def main() -> None:
    """Print one line a case and keep the numbers."""
    listed, results = nodes(), []
    kept = accounts(listed)
    gc_freeze.freeze_gc()  # as the operator does after its first listing
    for name, case in CASES.items():
        known = case.facts()

        def on_a_laptop(known: Facts = known) -> Facts:
            return replace(known, inventory=inventory_from_nodes(CATALOG, listed))

        def in_the_operator(known: Facts = known) -> Facts:
            return replace(known, inventory=kept.free(("team", "case")), capacity=kept.capacity())

        for where, prepare in {"laptop": on_a_laptop, "operator": in_the_operator}.items():
            numbers, summary = timed(prepare, case.deployment())
            results.append({"case": name, "where": where, "summary": summary, **numbers})
            median, worst = numbers["plan_milliseconds_median"], numbers["plan_milliseconds_worst"]
            print(f"{median:8.1f} ms, worst {worst:6.1f} ms  {name} ({where}): {summary}", flush=True)
    worst = max(results, key=lambda one: one["plan_milliseconds_worst"])
    print(f"worst: {worst['plan_milliseconds_worst']} ms, {worst['case']} ({worst['where']})")
    RESULT.write_text(json.dumps({"nodes": NODES, "rounds": ROUNDS, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
