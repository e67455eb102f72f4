"""`python -m benchmarks`: every benchmark of this folder that this machine can run. Rewrites benchmarks/results/."""

from __future__ import annotations

import argparse

from benchmarks import (
    boot,
    long_prompt_latency,
    mixed_latency,
    prefix_cache,
    runtime_vs_transformers,
    scheduler,
    server_overhead,
)

if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m benchmarks", description="Run the benchmarks and write results/."
    ).parse_args()
    scheduler.main()
    boot.main([])
    prefix_cache.main([])
    server_overhead.main()
    long_prompt_latency.main([])
    mixed_latency.main([])
    runtime_vs_transformers.main()
