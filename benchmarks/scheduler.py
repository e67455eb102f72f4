"""What planning costs, and how full the KV pool gets: the scheduler and the block manager without a model.

plan           `schedule(state)` alone for 256 decoding sequences: the budget is 0.5 ms a step
step           the same with carrying the plan out (blocks, prefix cache, queues)
utilisation    tokens in the pool over token places held, in a mixed load that keeps every row busy
"""

from __future__ import annotations

import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks import machine
from millstream_runtime.engine.request import Request, SamplingParams
from millstream_runtime.engine.scheduling.block_manager import BlockManager
from millstream_runtime.engine.scheduling.scheduler import Scheduler
from millstream_runtime.engine.scheduling.sequence import Sequence
from millstream_runtime.engine.scheduling.step_plan import SchedulerState, schedule

RESULT = Path(__file__).parent / "results" / "scheduler.json"
NUM_RUNNING = 256
BLOCK_TOKENS = 16
BUDGET_TOKENS = 2048


def new_sequence(arrival: int, rng: random.Random) -> Sequence:
    """100 to 1,024 tokens in and out, as in the bench of nano-vllm."""
    prompt = [rng.randrange(32_000) for _ in range(rng.randint(100, 1024))]
    request = Request(str(arrival), prompt, SamplingParams(max_tokens=rng.randint(100, 1024)))
    return Sequence(request, arrival, seed=0, token_ids=prompt, num_prompt_tokens=len(prompt))


def advance(scheduler: Scheduler) -> int:
    """One step with a model that always says 7; returns how many sequences ended."""
    chunks = scheduler.apply(scheduler.plan())
    sampling = [chunk.sequence for chunk in chunks if chunk.samples]
    scheduler.advance(chunks)
    ended = 0
    for sequence in sampling:
        sequence.append(7)
        if sequence.num_generated_tokens >= sequence.request.sampling.max_tokens:
            scheduler.remove(sequence)
            ended += 1
    return ended


def measure() -> dict[str, Any]:
    """Microseconds (median and p99) and the utilisation, over 600 steps of a full batch."""
    rng = random.Random(5)
    blocks = BlockManager(24_000, BLOCK_TOKENS, NUM_RUNNING, enable_prefix_caching=True)
    scheduler = Scheduler(blocks, BUDGET_TOKENS, NUM_RUNNING)
    arrivals = 0
    for arrivals in range(NUM_RUNNING):
        scheduler.add(new_sequence(arrivals, rng))
    while scheduler.num_waiting or any(one.num_uncomputed_tokens > 1 for one in scheduler.running):
        advance(scheduler)
    plans: list[float] = []
    steps: list[float] = []
    shares: list[float] = []
    for _ in range(600):
        state = SchedulerState(blocks, scheduler.running, scheduler._waiting, len(scheduler._free_rows), BUDGET_TOKENS)
        start = time.perf_counter()
        schedule(state)
        middle = time.perf_counter()
        ended = advance(scheduler)
        steps.append(time.perf_counter() - middle)
        plans.append(middle - start)
        held = blocks.num_blocks - blocks.num_free_blocks
        shares.append(sum(one.num_computed_tokens for one in scheduler.running) / (held * BLOCK_TOKENS))
        for _ in range(ended):
            arrivals += 1
            scheduler.add(new_sequence(arrivals, rng))
    blocks.check_integrity(scheduler.running)
    return {
        "running": NUM_RUNNING,
        "plan_microseconds": _summary(plans),
        "step_microseconds": _summary(steps),
        "kv_utilisation_median": round(statistics.median(shares), 4),
        "preemptions": scheduler.num_preemptions_total,
    }


def _summary(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "median": round(statistics.median(ordered) * 1e6, 1),
        "p99": round(ordered[len(ordered) * 99 // 100] * 1e6, 1),
        "minimum": round(ordered[0] * 1e6, 1),
    }


def main() -> None:
    """Measure, print, save."""
    result = measure()
    plan, step = result["plan_microseconds"], result["step_microseconds"]
    print(
        f"scheduler at {NUM_RUNNING} running: plan {plan['median']} us (p99 {plan['p99']}), "
        f"whole step {step['median']} us (p99 {step['p99']}), KV utilisation {result['kv_utilisation_median']:.1%}"
    )
    RESULT.write_text(json.dumps({"machine": machine.describe(), **result}, indent=2) + "\n")
    print(f"saved {RESULT}")


if __name__ == "__main__":
    main()
