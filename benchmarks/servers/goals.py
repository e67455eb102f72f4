"""What is to be reached beside the peers, and whether it was. Pure."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from benchmarks.servers.peers import LLAMA_CPP, OURS, VLLM

# Our tokens per second over theirs must be at least this.
THROUGHPUT = {
    "demo": {
        VLLM: {"1-equal": 3.5, "16-equal": 1.5, "16-mixed": 1.5, "64-mixed": 1.3, "128-mixed": 1.3},
        LLAMA_CPP: {"1-equal": 1.0},
    },
    "larger": {
        VLLM: {"1-equal": 1.8, "16-equal": 1.3, "16-mixed": 1.3, "64-mixed": 1.3, "128-mixed": 1.3},
        LLAMA_CPP: {"1-equal": 1.0},
    },
}
LATENCIES = {"ttft_p50_ms": "TTFT p50", "ttft_p95_ms": "TTFT p95", "itl_p99_ms": "ITL p99"}  # no higher than vLLM's
GROWING = ("16-mixed", "32-mixed", "64-mixed", "128-mixed")  # our throughput: more clients, no fewer tokens
NOISE = 0.95
THROUGHPUT_NAME = "tokens_per_second"


def judge(model: str, medians: dict[str, dict[str, dict[str, float]]]) -> list[dict[str, Any]]:
    """Each goal whose figures are there, with what was found.

    Args:
        medians: figures by case and server.
    """
    found = []
    for case, servers in medians.items():
        if OURS not in servers:
            continue
        for peer, bounds in THROUGHPUT[model].items():
            if peer in servers and case in bounds:
                ratio = servers[OURS][THROUGHPUT_NAME] / max(servers[peer][THROUGHPUT_NAME], 1e-9)
                found.append(_goal(case, f"tokens/s over {peer}", ratio, ">=", bounds[case]))
        if VLLM in servers:
            for name, label in LATENCIES.items():
                ratio = servers[OURS][name] / max(servers[VLLM][name], 1e-9)
                found.append(_goal(case, f"{label} over {VLLM}", ratio, "<=", 1.0))
    ours = {case: servers[OURS][THROUGHPUT_NAME] for case, servers in medians.items() if OURS in servers}
    measured = [case for case in GROWING if case in ours]
    for fewer, more in pairwise(measured):
        found.append(_goal(more, f"our tokens/s over {fewer}", ours[more] / max(ours[fewer], 1e-9), ">=", NOISE))
    return found


def _goal(case: str, what: str, value: float, relation: str, bound: float) -> dict[str, Any]:
    reached = value >= bound if relation == ">=" else value <= bound
    return {"case": case, "what": what, "value": round(value, 3), "goal": f"{relation} {bound:g}", "reached": reached}
