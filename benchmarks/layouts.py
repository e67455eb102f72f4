"""Products by the float32 matrices of a 135 M-parameter Llama, in the layouts that a weight may have on a CPU.

    MKL     [in, out] as it is
    split   the same in parts for 8 rows and fewer (`models/split_product.py`): where memory has no room for a copy
    two     as served where it has: [out, in] for one row, oneDNN's blocks for more (`models/two_layouts.py`)
    half    the same of a bfloat16 checkpoint: a float16 copy for few rows (`models/half_weights.py`), `two` for more

All are told as bytes of the float32 weight a second, so that they compare. Each is read from memory, as in a decode:
there are more of them than any cache holds. All threads of this machine.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import machine
from benchmarks.shapes import LARGER
from millstream_runtime.models.cpu import two_layouts
from millstream_runtime.models.cpu.half_weights import half_copy
from millstream_runtime.models.cpu.linear import CpuLinear
from millstream_runtime.models.cpu.split_product import num_parts, split_product

RESULT = Path(__file__).parent / "results" / "layouts.json"
ROWS = (1, 2, 4, 8, 16, 64, 256)
STREAM_BYTES, REPEATS = 200_000_000, 7


def seconds_of(run: Callable[[], object]) -> float:
    """The median."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def shapes() -> dict[str, tuple[int, int]]:
    """`(in, out)` by name."""
    hidden, intermediate, vocab = LARGER["hidden_size"], LARGER["intermediate_size"], LARGER["vocab_size"]
    key_value = LARGER["num_key_value_heads"] * LARGER["head_dim"]
    return {
        "qkv": (hidden, hidden + 2 * key_value),
        "attention output": (hidden, hidden),
        "gate and up": (hidden, 2 * intermediate),
        "down": (intermediate, hidden),
        "head": (hidden, vocab),
    }


def ways(fan_in: int, fan_out: int, count: int) -> dict[str, Callable[[Tensor], object]]:
    """Each multiplies rows by the same `count` matrices."""
    checkpoint = [torch.randn(fan_out, fan_in).bfloat16().float() for _ in range(count)]
    weights = [one.t().contiguous() for one in checkpoint]
    two = [CpuLinear(one.t(), None, packed=two_layouts.pack(one.t())) for one in checkpoint]
    half = [replace(one, half=half_copy(one.weight)) for one in two]

    def split(x: Tensor) -> None:
        parts = num_parts(x, weights[0])
        for one in weights:
            split_product(x, one, parts) if parts > 1 else torch.mm(x, one)

    return {
        "MKL": lambda x: [torch.mm(x, one) for one in weights],
        "split": split,
        "two": lambda x: [one(x) for one in two],
        "half": lambda x: [one(x) for one in half],
    }


def main() -> None:
    """Measure, print, save."""
    results: list[dict[str, Any]] = []
    for name, (fan_in, fan_out) in shapes().items():
        count = max(2, STREAM_BYTES // (4 * fan_in * fan_out))
        calls = ways(fan_in, fan_out, count)
        for rows in ROWS:
            x = torch.randn(rows, fan_in)
            for call in calls.values():  # oneDNN makes its code in the first call of a shape
                call(x)
            seconds = {way: seconds_of(lambda call=call, x=x: call(x)) for way, call in calls.items()}  # type: ignore[misc]
            rates = {way: 4 * fan_in * fan_out * count / one for way, one in seconds.items()}
            results.append(
                {"matrix": name, "rows": rows, "weight_bytes_per_second": {k: round(v) for k, v in rates.items()}}
            )
            text = "   ".join(f"{way} {rate / 1e9:5.1f} GB/s" for way, rate in rates.items())
            print(f"{name:16} {rows:3} rows   {text}   two {rates['two'] / rates['MKL']:.2f} x MKL", flush=True)
    RESULT.write_text(json.dumps({"machine": machine.describe(), "products": results}, indent=2) + "\n")
    print(f"saved {RESULT}")


if __name__ == "__main__":
    main()
