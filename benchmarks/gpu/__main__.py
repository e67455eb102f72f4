"""Eager steps, CUDA graphs, and graphs with overlapped steps, on one GPU, in one run.

    python -m benchmarks.gpu                      every shape; writes benchmarks/results/gpu_<shape>.json
    python -m benchmarks.gpu --shape Qwen3-0.6B   one of them
    python -m benchmarks.gpu --dry-run            a tiny shape on a CPU: the script works; nothing is written

Weights are random, in bf16: speed does not depend on their values. Two loads: 256 requests of 100 to 1,024 tokens in
and out ("nano bench"), and one request alone. Each number comes with its share of the roofline of an H200, and steady
decoding with the share of time in which the GPU had nothing to do.

From the steps that the engines timed follow the shares of its peaks that this GPU reached: its entry in
`operator/millstream_operator/catalog/efficiencies.yaml`, by which the planner predicts from then on.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu.efficiencies import NotMeasuredError, record
from benchmarks.gpu.roofline import most_tokens_per_second, peak_rates
from benchmarks.gpu.shapes import SHAPES, TINY, Shape
from benchmarks.gpu.workloads import ALONE, NANO, Load, steady_idle_share, tokens_per_second
from benchmarks.machine import describe
from millstream_runtime.config import Device, DType, RuntimeConfig
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.execution.execution_mode import Execution
from millstream_runtime.engine.execution.graphs.recorders import CudaRecorder, Recorder
from tests.support.eager_recorder import EagerRecorder

RESULTS = Path(__file__).parents[1] / "results"
DRY_NANO, DRY_ALONE = Load(5, 4, 20), Load(1, 8, 8)


def write_random_weights(folder: Path, shape: Shape, device: str) -> Path:
    """config.json and bf16 safetensors of a shape, made on `device`: 8 B weights take a CPU minutes."""
    torch.manual_seed(0)
    fields = dict(shape.config)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields, initializer_range=0.02, eos_token_id=1)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def executions(recorder: Callable[[], Recorder]) -> dict[str, Execution]:
    return {
        "eager": Execution(),
        "graphs": Execution(recorder()),
        "graphs_overlapped": Execution(recorder(), overlapped=True),
    }


def measure(folder: Path, shape: Shape, execution: Execution, *, dry_run: bool) -> dict[str, Any]:
    """Both loads on one engine, which is gone afterwards."""
    nano, alone = (DRY_NANO, DRY_ALONE) if dry_run else (NANO, ALONE)
    config = RuntimeConfig(
        model=str(folder),
        served_model_name="benchmark",
        device=Device.CPU if dry_run else Device.CUDA,
        dtype=DType.FLOAT32 if dry_run else DType.BFLOAT16,
        max_model_len=2 * nano.most,
        max_num_seqs=nano.num_requests,
        max_num_batched_tokens=256 if dry_run else 16384,
        kv_cache_memory_bytes=1 << 20 if dry_run else None,
    )
    engine = Engine(config, lambda phase, message: None, execution=execution)
    engine.warm_up()
    nano_rate, alone_rate = tokens_per_second(engine, nano), tokens_per_second(engine, alone)
    result = {
        "nano_tokens_per_second": nano_rate,
        "nano_roofline_share": None if dry_run else nano_rate / _most(shape, nano),
        "alone_tokens_per_second": alone_rate,
        "alone_roofline_share": None if dry_run else alone_rate / _most(shape, alone),
        "nano_idle_share": steady_idle_share(engine, nano.num_requests),
        "alone_idle_share": steady_idle_share(engine, 1),
        "graphs": asdict(engine.graphs) if engine.graphs is not None else None,
        "memory": asdict(engine.memory_use),
        "steps": [one.measured() for one in engine.step_times],
    }
    engine.close()
    del engine
    gc.collect()
    if not dry_run:
        torch.cuda.empty_cache()
    return result


def _most(shape: Shape, load: Load) -> float:
    return most_tokens_per_second(shape.config, load.lengths(), peak_rates())


def run(name: str, shape: Shape, save: Callable[[dict[str, Any]], None], *, dry_run: bool) -> None:
    """All executions of one shape, printed and saved as they come."""
    recorder: Callable[[], Recorder] = EagerRecorder if dry_run else lambda: CudaRecorder(torch.device("cuda", 0))
    results: dict[str, Any] = {}
    report = {"shape": name, "machine": describe(), "results": results}
    with tempfile.TemporaryDirectory() as folder:
        write_random_weights(Path(folder), shape, "cpu" if dry_run else "cuda")
        for how, execution in executions(recorder).items():
            results[how] = measure(Path(folder), shape, execution, dry_run=dry_run)
            print(f"{name:14} {how:18} {_line(results[how])}", flush=True)
            save(report)


def _line(result: dict[str, Any]) -> str:
    parts = []
    for load in ("nano", "alone"):
        share, idle = result[f"{load}_roofline_share"], result[f"{load}_idle_share"]
        of_roofline = "" if share is None else f" ({share:.0%} of the roofline)"
        parts.append(f"{load} {result[f'{load}_tokens_per_second']:,.0f} tok/s{of_roofline}")
        parts.append("" if idle is None else f"GPU idle {idle:.1%}")
    return "; ".join(part for part in parts if part)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=[*SHAPES], help="one of them (default: all)")
    parser.add_argument("--dry-run", action="store_true", help="a tiny shape on a CPU; nothing is written")
    args = parser.parse_args(argv)
    if args.dry_run:
        run("tiny", TINY, lambda report: None, dry_run=True)
        return 0
    if not torch.cuda.is_available():
        print(
            "This benchmark needs a CUDA device, and torch sees none; --dry-run shows its way on a CPU.",
            file=sys.stderr,
        )
        return 1
    for name in [args.shape] if args.shape else SHAPES:
        path = RESULTS / f"gpu_{name.lower()}.json"
        run(name, SHAPES[name], partial(_save, path), dry_run=False)
    try:
        print(record(RESULTS, torch.cuda.get_device_name()))
    except NotMeasuredError as error:
        print(f"The planner's efficiencies stay as they are: {error}.", file=sys.stderr)
    return 0


def _save(path: Path, report: dict[str, Any]) -> None:
    path.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
