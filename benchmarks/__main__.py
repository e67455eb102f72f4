"""`python -m benchmarks`: every benchmark of this folder that this machine can run."""

from __future__ import annotations

from benchmarks import runtime_vs_transformers

if __name__ == "__main__":
    runtime_vs_transformers.main()
