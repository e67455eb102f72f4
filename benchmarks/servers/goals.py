"""What is to be reached beside the peers, and whether it was. Pure."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from benchmarks.servers.models import AUTO, FLOAT32
from benchmarks.servers.peers import LLAMA_CPP, OURS, VLLM

Bounds = dict[str, dict[str, float]]

# Our tokens per second over theirs must be at least this, by model and dtype.
THROUGHPUT: dict[tuple[str, str], Bounds] = {
    ("demo", FLOAT32): {
        VLLM: {"1-equal": 3.5, "16-equal": 1.5, "16-mixed": 1.5, "64-mixed": 1.3, "128-mixed": 1.3},
        LLAMA_CPP: {"1-equal": 1.0},
    },
    ("larger", FLOAT32): {
        VLLM: {"1-equal": 1.8, "16-equal": 1.3, "16-mixed": 1.3, "64-mixed": 1.3, "128-mixed": 1.3},
        LLAMA_CPP: {"1-equal": 1.0},
    },
    ("larger", AUTO): {VLLM: {"1-equal": 1.5, "16-equal": 1.25, "16-mixed": 1.25, "64-mixed": 1.2, "128-mixed": 1.2}},
    ("1b", AUTO): {VLLM: {"1-equal": 1.4, "16-equal": 1.15, "16-mixed": 1.15, "64-mixed": 1.0}},
}
LATENCIES = {"ttft_p50_ms": "TTFT p50", "ttft_p95_ms": "TTFT p95", "itl_p99_ms": "ITL p99"}
# At most so many times vLLM's, by dtype. A burst of prompts is bound by products, which are the same library's.
MOST_LATENCY = {
    AUTO: {"ttft_p50_ms": 1.1, "ttft_p95_ms": 1.0, "itl_p99_ms": 1.0},
    FLOAT32: dict.fromkeys(LATENCIES, 1.0),
}
GROWING = ("16-mixed", "32-mixed", "64-mixed", "128-mixed")  # our throughput: more clients, no fewer tokens
NOISE = 0.95
THROUGHPUT_NAME = "tokens_per_second"


def judge(
    model: str, dtype: str, medians: dict[str, dict[str, dict[str, float]]], memory: dict[str, int]
) -> list[dict[str, Any]]:
    """Each goal whose figures are there, with what was found.

    Args:
        medians: figures by case and server.
        memory: bytes by server, after the last case.
    """
    found = []
    for case, servers in medians.items():
        if OURS not in servers:
            continue
        for peer, bounds in THROUGHPUT.get((model, dtype), {}).items():
            if peer in servers and case in bounds:
                ratio = servers[OURS][THROUGHPUT_NAME] / max(servers[peer][THROUGHPUT_NAME], 1e-9)
                found.append(_goal(case, f"tokens/s over {peer}", ratio, ">=", bounds[case]))
        if VLLM in servers:
            for name, label in LATENCIES.items():
                ratio = servers[OURS][name] / max(servers[VLLM][name], 1e-9)
                found.append(_goal(case, f"{label} over {VLLM}", ratio, "<=", MOST_LATENCY[dtype][name]))
    ours = {case: servers[OURS][THROUGHPUT_NAME] for case, servers in medians.items() if OURS in servers}
    measured = [case for case in GROWING if case in ours]
    for fewer, more in pairwise(measured):
        found.append(_goal(more, f"our tokens/s over {fewer}", ours[more] / max(ours[fewer], 1e-9), ">=", NOISE))
    ours_bytes, theirs_bytes = memory.get(OURS, 0), memory.get(VLLM, 0)  # 0: it has ended
    if ours_bytes and theirs_bytes:
        found.append(_goal("all", f"memory over {VLLM}", ours_bytes / theirs_bytes, "<=", 1.0))
    return found


def _goal(case: str, what: str, value: float, relation: str, bound: float) -> dict[str, Any]:
    reached = value >= bound if relation == ">=" else value <= bound
    return {"case": case, "what": what, "value": round(value, 3), "goal": f"{relation} {bound:g}", "reached": reached}
