"""`python -m benchmarks`: every benchmark of this folder that this machine can run."""

from __future__ import annotations

from benchmarks import prefix_cache, runtime_vs_transformers, scheduler

if __name__ == "__main__":
    scheduler.main()
    prefix_cache.main([])
    runtime_vs_transformers.main()
