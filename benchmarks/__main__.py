"""`python -m benchmarks`: every benchmark of this folder that this machine can run."""

from __future__ import annotations

from benchmarks import boot, long_prompt_latency, prefix_cache, runtime_vs_transformers, scheduler, server_overhead

if __name__ == "__main__":
    scheduler.main()
    boot.main([])
    prefix_cache.main([])
    server_overhead.main()
    long_prompt_latency.main([])
    runtime_vs_transformers.main()
