"""Products of few rows by the matrices of a 135 M-parameter Llama: MKL's own way against the parts of `split_product`.

Each is read from memory, as in a decode: there are more of them than any cache holds. All threads of this machine.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.shapes import LARGER
from millstream_runtime.models.split_product import num_parts, split_product

RESULT = Path(__file__).parent / "results" / "few_rows.json"
ROWS = (1, 2, 4, 8)
STREAM_BYTES, REPEATS = 300_000_000, 9


def seconds_of(run: Callable[[], object]) -> float:
    """The median."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    """Measure, print, save."""
    hidden, intermediate, vocab = LARGER["hidden_size"], LARGER["intermediate_size"], LARGER["vocab_size"]
    key_value = LARGER["num_key_value_heads"] * LARGER["head_dim"]
    shapes = {
        "qkv": (hidden, hidden + 2 * key_value),
        "attention output": (hidden, hidden),
        "gate and up": (hidden, 2 * intermediate),
        "down": (intermediate, hidden),
        "head": (hidden, vocab),
    }
    results: list[dict[str, Any]] = []
    for name, (fan_in, fan_out) in shapes.items():
        count = max(2, STREAM_BYTES // (4 * fan_in * fan_out))
        weights = [torch.randn(fan_in, fan_out) for _ in range(count)]
        for rows in ROWS:
            x = torch.randn(rows, fan_in)
            parts = num_parts(x, weights[0])
            whole = seconds_of(lambda x=x, weights=weights: [torch.mm(x, one) for one in weights])  # type: ignore[misc]
            cut = seconds_of(
                lambda x=x, weights=weights, parts=parts: [split_product(x, one, parts) for one in weights]  # type: ignore[misc]
            )
            read_bytes = 4 * fan_in * fan_out * count
            one = {"matrix": name, "rows": rows, "parts": parts, "ratio": round(whole / cut, 3)}
            one |= {
                "whole_bytes_per_second": round(read_bytes / whole),
                "cut_bytes_per_second": round(read_bytes / cut),
            }
            results.append(one)
            print(
                f"{name:16} {rows} rows  whole {read_bytes / whole / 1e9:5.1f} GB/s   in {parts} parts "
                f"{read_bytes / cut / 1e9:5.1f} GB/s   {one['ratio']:.2f} ×",
                flush=True,
            )
    RESULT.write_text(json.dumps({"machine": machine.describe(), "products": results}, indent=2) + "\n")
    print(f"saved {RESULT}")


if __name__ == "__main__":
    main()
