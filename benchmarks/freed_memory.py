"""A prompt of 2,000 tokens through 135 M parameters: malloc as `freed_memory` sets it, against glibc's defaults.

Short requests come between the prompts, as in a server. With prompts alone glibc often settles by itself, depending on
what lies where in the heap. Each way in processes of its own, in turns, since malloc's settings stay with a process.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.random_model import write_random_model
from benchmarks.shapes import LARGER
from millstream_runtime.config import Device, RuntimeConfig
from millstream_runtime.engine.cpu import freed_memory
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.request import Request, SamplingParams

RESULT = Path(__file__).parent / "results" / "freed_memory.json"
PROMPT_TOKENS, PROMPTS, PROCESSES = 2000, 5, 3
KEPT, GIVEN_BACK = "kept", "given back"


def measure(folder: str, way: str) -> dict[str, float]:
    """Medians over prompts, in this process. Its first prompt faults either way and is not counted."""
    if way == GIVEN_BACK:
        freed_memory.keep_freed_memory = lambda: False
    config = RuntimeConfig(
        model=folder, served_model_name="bench", device=Device.CPU, max_num_seqs=16, enable_prefix_caching=False
    )
    engine = Engine(config, lambda phase, message: None)
    engine.warm_up()
    seconds, system_seconds, faults = [], [], []
    for number in range(1 + PROMPTS):
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        answer(engine, f"long {number}", PROMPT_TOKENS, 1)
        seconds.append(time.perf_counter() - start)
        after = resource.getrusage(resource.RUSAGE_SELF)
        system_seconds.append(after.ru_stime - before.ru_stime)
        faults.append(after.ru_minflt - before.ru_minflt)
        for short in range(16):
            answer(engine, f"short {number} {short}", 16, 2)
    return {
        "prompt_seconds": round(statistics.median(seconds[1:]), 3),
        "system_seconds": round(statistics.median(system_seconds[1:]), 3),  # of the processors' time, in the kernel
        "page_faults": statistics.median(faults[1:]),
        "resident_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }


def answer(engine: Engine, name: str, prompt_tokens: int, new_tokens: int) -> None:
    """One request, alone."""
    prompt = [3 + index for index in range(prompt_tokens)]
    engine.add_request(Request(name, prompt, SamplingParams(new_tokens, temperature=0.0, ignore_eos=True)))
    while engine.has_work():
        engine.step()


def main() -> None:
    """Measure, print, save."""
    runs: dict[str, list[dict[str, float]]] = {KEPT: [], GIVEN_BACK: []}
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_random_model(Path(scratch) / "larger", LARGER)
        for _ in range(PROCESSES):
            for way, results in runs.items():
                command = [sys.executable, "-m", "benchmarks.freed_memory", str(folder), way]
                results.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
                print(f"{way:10} {results[-1]}", flush=True)
    ratios = [one["prompt_seconds"] for one in runs[GIVEN_BACK]], [one["prompt_seconds"] for one in runs[KEPT]]
    ratio = round(statistics.median(ratios[0]) / statistics.median(ratios[1]), 3)
    print(f"kept: {ratio} x as fast")
    report: dict[str, Any] = {"machine": machine.describe(), "prompt_tokens": PROMPT_TOKENS, "ratio": ratio, **runs}
    RESULT.write_text(json.dumps(report, indent=2) + "\n")
    print(f"saved {RESULT}")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(measure(*sys.argv[1:])))
    else:
        main()
