"""What each mechanism of the CPU engine gains: on against off, on the demo model and on the shape of a 135M model.

    python -m benchmarks.cpu_mechanisms
    python -m benchmarks.cpu_mechanisms --only "float16 copies" --pairs 9

Two engines, with and without the mechanism, take turns (`cpu_workloads`) in one process, or each in processes of its
own where the setting belongs to the process. `cpu_switches` says how a mechanism is switched off. A ratio is tokens per
second with the mechanism over those without, per pair of neighbouring runs: the median of the pairs, and in brackets
the lowest and the highest. Ratios of processor time stand beside those of wall time, since a shared machine disturbs
them less. A random model has the shape of SmolLM2-135M and weights in bfloat16, as published checkpoints have.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import machine
from benchmarks.cpu_switches import MECHANISMS, Mechanism
from benchmarks.cpu_workloads import (
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    Sample,
    Size,
    run_workload,
)
from benchmarks.shapes import LARGER
from millstream_runtime.config import Device, RuntimeConfig
from millstream_runtime.engine.cpu import warm_up
from millstream_runtime.engine.engine import Engine
from millstream_runtime.server.engine.huge_pages import engine_environment

RESULT = Path(__file__).parent / "results" / "cpu_mechanisms.json"
DEMO_MODEL = Path(__file__).parent.parent / "models" / "demo-chat"
ON, OFF = "on", "off"
SAMPLES_PER_PROCESS = 2
SIZES = (Size(160, 40, 4, decode_threads=1), Size(24, 8, 1, decode_threads=2))  # about half a second, on two cores
MOST_DECODE_TOKENS = 32


@dataclass
class Side:
    """One engine, and what was measured on it."""

    engine: Engine
    samples: dict[str, list[Sample]] = field(default_factory=dict)


def make_engine(folder: str, mechanism: Mechanism, decode_threads: int = 1) -> Engine:
    """An engine as served, warmed up, but for the threads of small steps: both sides of a comparison have the same.

    An engine measures these itself, and on a shared machine two may choose differently.
    """
    fields = {
        "enable_prefix_caching": False,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_NUM_SEQS,
        **mechanism.config,
    }
    config = RuntimeConfig(model=folder, served_model_name="bench", device=Device.CPU, **fields)
    engine = Engine(config, lambda phase, message: None)
    with patch.object(warm_up, "measure_threads", lambda steps, all_threads: ((MOST_DECODE_TOKENS, decode_threads),)):
        engine.warm_up()
    return engine


def measure(folder: str, mechanism: Mechanism, states: list[str], pairs: int, size: Size) -> dict[str, Any]:
    """Samples by state and workload, of this process. The states alternate; each pair begins with another one."""
    switches = {ON: mechanism.given, OFF: mechanism.off}
    with mechanism.given():
        sides: dict[str, Side] = {}
        for state in states:
            with switches[state]():
                sides[state] = Side(make_engine(folder, mechanism, size.decode_threads))
        for workload in mechanism.workloads:
            first = 0 if workload in mechanism.once else -1  # the pair before the first warms both
            for pair in range(first, pairs):
                for state in sorted(states, reverse=pair % 2 == 1):
                    side = sides[state]
                    with switches[state]():
                        sample = run_workload(workload, side.engine, random.Random(f"{workload}{pair}"), size)
                    if pair >= 0:
                        side.samples.setdefault(workload, []).append(sample)
        for side in sides.values():
            side.engine.check_integrity()
            side.engine.close()
    samples = {
        state: {name: [asdict(one) for one in of] for name, of in side.samples.items()} for state, side in sides.items()
    }
    return {"samples": samples, "resident_peak_bytes": resident_peak_bytes()}


def resident_peak_bytes() -> int:
    """Of this process since it was started; getrusage would count its parent's too."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def measure_in_processes(folder: str, mechanism: Mechanism, pairs: int, size: Size) -> dict[str, Any]:
    """The same with a process for each engine of each pair; of its samples the median one counts."""
    samples: dict[str, dict[str, list[dict[str, Any]]]] = {ON: {}, OFF: {}}
    resident: dict[str, list[int]] = {ON: [], OFF: []}
    for pair in range(pairs):
        for state in sorted((ON, OFF), reverse=pair % 2 == 1):
            found = in_process(folder, mechanism, [state], SAMPLES_PER_PROCESS, size)
            resident[state].append(found["resident_peak_bytes"])
            for workload, of in found["samples"][state].items():
                is_once = workload in mechanism.once
                sample = of[0] if is_once else sorted(of, key=lambda one: one["seconds"])[(len(of) - 1) // 2]
                samples[state].setdefault(workload, []).append(sample)
    peaks = {state: round(statistics.median(of)) for state, of in resident.items()}
    return {"samples": samples, "resident_peak_bytes": peaks}


def in_process(folder: str, mechanism: Mechanism, states: list[str], pairs: int, size: Size) -> dict[str, Any]:
    """`measure` in a process of its own, with the environment of an engine process."""
    arguments = {"folder": folder, "states": states, "pairs": pairs, "size": asdict(size)}
    command = [sys.executable, "-m", "benchmarks.cpu_mechanisms", "--measure", json.dumps(arguments)]
    environment = engine_environment(os.environ, Device.CPU)
    if states == [OFF]:
        environment |= mechanism.environment_off
    done = subprocess.run(
        [*command, "--only", mechanism.name], check=True, stdout=subprocess.PIPE, env=environment, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def summarise(on: list[dict[str, Any]], off: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians, and ratios above 1 where the mechanism gains."""
    summary: dict[str, Any] = {"tokens_per_second": {ON: rate(on), OFF: rate(off)}}
    for key, name in (("seconds", "ratio"), ("processor_seconds", "processor_ratio"), ("gap_seconds", "gap_ratio")):
        if on[0][key] is None:
            continue
        of = sorted(b[key] / b["tokens"] * a["tokens"] / a[key] for a, b in zip(on, off, strict=True))
        if key == "gap_seconds":
            of = sorted(b[key] / a[key] for a, b in zip(on, off, strict=True))
            summary["gap_milliseconds"] = {
                state: round(statistics.median(one[key] for one in samples) * 1e3, 2)
                for state, samples in ((ON, on), (OFF, off))
            }
        summary[name] = {"median": round(statistics.median(of), 3), "low": round(of[0], 3), "high": round(of[-1], 3)}
    return summary


def rate(samples: list[dict[str, Any]]) -> float:
    """Tokens per second, the median."""
    return round(float(statistics.median(one["tokens"] / one["seconds"] for one in samples)), 1)


def table(results: dict[str, dict[str, Any]]) -> str:
    """The results as one Markdown table: mechanism and workload down, models across."""
    columns = [column for model in results for column in (f"{model}, tokens/s", "ratio", "processor")]
    lines = ["| mechanism | workload | " + " | ".join(columns) + " |", "|---|---|" + "--:|" * len(columns)]
    names = [one.name for one in MECHANISMS if any(one.name in of for of in results.values())]
    for name in names:
        found = [of.get(name, {}).get("workloads", {}) for of in results.values()]
        for workload in dict.fromkeys(key for of in found for key in of):
            summaries = [of.get(workload) for of in found]
            lines.append(row(name, workload, [None if one is None else speed_cells(one) for one in summaries]))
            if any(one is not None and "gap_ratio" in one for one in summaries):
                cells = [None if one is None else gap_cells(one) for one in summaries]
                lines.append(row(name, f"{workload}: slow steps, ms", cells))
    return "\n".join(lines)


def row(name: str, workload: str, cells: list[list[str] | None]) -> str:
    """One line; a model that was not measured has empty cells."""
    flat = [cell for of in cells for cell in (["", "", ""] if of is None else of)]
    return f"| {name} | {workload} | {' | '.join(flat)} |"


def speed_cells(summary: dict[str, Any]) -> list[str]:
    """Tokens per second with and without, the ratio, and that of processor time."""
    rates = summary["tokens_per_second"]
    processor = f"{summary['processor_ratio']['median']:.2f}"
    return [f"{rates[ON]:.0f} : {rates[OFF]:.0f}", with_spread(summary["ratio"]), processor]


def gap_cells(summary: dict[str, Any]) -> list[str]:
    """Milliseconds of the slow steps, and their ratio."""
    gaps = summary["gap_milliseconds"]
    return [f"{gaps[ON]:.0f} : {gaps[OFF]:.0f}", with_spread(summary["gap_ratio"]), ""]


def with_spread(ratio: dict[str, float]) -> str:
    """The median, and in brackets the lowest and the highest."""
    return f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"


def run(
    models: dict[str, str], mechanisms: list[Mechanism], pairs: int, sizes: dict[str, Size], output: Path
) -> dict[str, Any]:
    """Every mechanism on every model (name to folder); saved after each mechanism."""
    results: dict[str, dict[str, Any]] = {model: {} for model in models}
    if len(mechanisms) < len(MECHANISMS) and output.exists():  # the results of the others stay
        results = json.loads(output.read_text(encoding="utf-8"))["models"]
    for mechanism in mechanisms:
        for model, folder in models.items():
            size = sizes[model]
            if mechanism.per_process:
                found = measure_in_processes(folder, mechanism, pairs, size)
            else:
                found = in_process(folder, mechanism, [ON, OFF], pairs, size)
            samples = found["samples"]
            workloads = {name: summarise(samples[ON][name], samples[OFF][name]) for name in mechanism.workloads}
            measured = {"cpu": machine.describe()["cpu"], "pairs": pairs}  # other results may be another machine's
            results[model][mechanism.name] = {**measured, "workloads": workloads}
            if mechanism.per_process:
                results[model][mechanism.name]["resident_peak_bytes"] = found["resident_peak_bytes"]
            for name, summary in workloads.items():
                print(f"{mechanism.name:40} {name:14} {model:12} {'  '.join(speed_cells(summary))}", flush=True)
        save(output, pairs, results)
    return results


def collector_pause_milliseconds() -> dict[str, float]:
    """A full garbage collection in a process that has imported the server, with the freeze and without."""
    program = (
        "import gc, json, statistics, time, millstream_runtime.server.model_server\n"
        "def pause():\n"
        "    began = time.perf_counter(); gc.collect(); return (time.perf_counter() - began) * 1e3\n"
        "gc.collect(); off = [pause() for _ in range(9)]\n"
        "gc.freeze(); on = [pause() for _ in range(9)]\n"
        "print(json.dumps({'on': round(statistics.median(on), 2), 'off': round(statistics.median(off), 2)}))"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(argv: list[str] | None = None) -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_mechanisms")
    parser.add_argument("--only", nargs="*", choices=[one.name for one in MECHANISMS], help="mechanisms; default: all")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    mechanisms = [one for one in MECHANISMS if args.only is None or one.name in args.only]
    if args.measure:
        asked = json.loads(args.measure)
        size = Size(**asked["size"])
        print(json.dumps(measure(asked["folder"], mechanisms[0], asked["states"], asked["pairs"], size)))
        return
    from benchmarks.random_model import write_random_model  # imports transformers, which no engine needs

    with tempfile.TemporaryDirectory() as scratch:
        larger = write_random_model(Path(scratch) / "larger", LARGER, dtype=torch.bfloat16)
        models = {"demo model": str(DEMO_MODEL), "135M shape": str(larger)}
        results = run(models, mechanisms, args.pairs, dict(zip(models, SIZES, strict=True)), args.output)
    print(table(results))
    save(args.output, args.pairs, results, collector_pause_milliseconds())


def save(path: Path, pairs: int, results: dict[str, Any], pause: dict[str, float] | None = None) -> None:
    """What is known so far: a run takes long, and may be cut short."""
    report = {"machine": machine.describe(), "pairs": pairs, "collector_pause_milliseconds": pause, "models": results}
    path.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
