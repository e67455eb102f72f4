"""Products by quantized matrices of a 135 M-parameter Llama on a CPU, against the same matrices in 16 bits.

    16 bit       a bfloat16 weight as it is served where memory has room: float32 and float16 copies
    float32      the dequantized weight, as it is served where memory has room: two float32 layouts
    dequantize   4 bits, groups of 64, zero points: dequantized run by run in each product
    4, 8 bits    the same from packed codes (`quantization/cpu/code_table.py`), as it is served where memory has no room

The ways take turns, and each reads more weights than a cache holds. Times are the best round in processor time of one
thread, since the machine may be shared; above 1 is faster than 16 bit.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import machine
from benchmarks.layouts import shapes
from millstream_runtime.models.cpu import two_layouts
from millstream_runtime.models.cpu.half_weights import half_copy
from millstream_runtime.models.cpu.linear import CpuLinear
from millstream_runtime.quantization.cpu.code_table import code_table
from millstream_runtime.quantization.cpu.table_linear import TableLinear
from millstream_runtime.quantization.grouped_weight import GroupedWeight, pack_halves, runs_of
from millstream_runtime.quantization.quantized_linear import DequantizingLinear

RESULT = Path(__file__).parent / "results" / "quantized_layers.json"
ROWS, GROUP_SIZE, STREAM_BYTES = (1, 2, 4, 8, 16, 64), 64, 60_000_000
HEAD = "head"  # never quantized
BASE = "16 bit"


def weight_of(bits: int, fan_in: int, fan_out: int) -> GroupedWeight:
    """Random codes with zero points."""
    groups = torch.arange(fan_in) // GROUP_SIZE
    codes = torch.randint(0, 1 << bits, (fan_in, fan_out), dtype=torch.uint8)
    zeros = torch.randint(0, 1 << bits, (int(groups.max()) + 1, fan_out), dtype=torch.uint8)
    scales = torch.rand(zeros.shape).half()
    packed = pack_halves if bits == 4 else lambda one: one
    return GroupedWeight(packed(codes), scales, packed(zeros), runs_of(groups), fan_out, bits)


def ways(fan_in: int, fan_out: int, count: int) -> dict[str, list[Callable[[Tensor], Tensor]]]:
    """Each computes with `count` matrices."""
    dense = [torch.randn(fan_out, fan_in).bfloat16().float().t() for _ in range(count)]
    packed = {bits: [weight_of(bits, fan_in, fan_out) for _ in range(count)] for bits in (4, 8)}
    return {
        BASE: [CpuLinear(one, None, half_copy(one), two_layouts.pack(one)) for one in dense],
        "float32": [CpuLinear(one, None, packed=two_layouts.pack(one)) for one in dense],
        "dequantize": [DequantizingLinear(one, None) for one in packed[4]],
        "4 bits": [TableLinear(code_table(one), None) for one in packed[4]],
        "8 bits": [TableLinear(code_table(one), None) for one in packed[8]],
    }


def milliseconds(calls: dict[str, list[Callable[[Tensor], Tensor]]], x: Tensor, rounds: int) -> dict[str, float]:
    """Of one matrix, by way; a first round warms up."""
    best = dict.fromkeys(calls, float("inf"))
    for round_ in range(rounds + 1):
        for name, several in calls.items():
            start = time.process_time()
            for one in several:
                one(x)
            if round_:
                best[name] = min(best[name], (time.process_time() - start) * 1e3 / len(several))
    return best


def main(argv: list[str] | None = None) -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantized_layers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    layer: dict[int, dict[str, float]] = {rows: {} for rows in ROWS}  # sums over the matrices of a layer
    for matrix, (fan_in, fan_out) in shapes().items():
        if matrix == HEAD:
            continue
        calls = ways(fan_in, fan_out, max(2, STREAM_BYTES // (4 * fan_in * fan_out)))
        for rows in ROWS:
            for name, one in milliseconds(calls, torch.randn(rows, fan_in), args.rounds).items():
                layer[rows][name] = layer[rows].get(name, 0) + one
    results: list[dict[str, Any]] = []
    for rows, times in layer.items():
        ratios = {name: round(times[BASE] / one, 2) for name, one in times.items() if name != BASE}
        rounded = {name: round(one, 3) for name, one in times.items()}
        results.append({"rows": rows, "layer_milliseconds": rounded, "times_as_fast": ratios})
        shown = ", ".join(f"{name} {ratio:.2f} x" for name, ratio in ratios.items())
        print(f"{rows:3} rows: 16 bit {times[BASE]:.2f} ms a layer; as fast: {shown}", flush=True)
    args.output.write_text(json.dumps({"machine": machine.describe(), "layers": results}, indent=2) + "\n")
    print(f"saved {args.output}")


if __name__ == "__main__":
    main()
