"""What the engine adds to the model: the share of a step of 16 decodes that is not spent in the model's own code.

    step      plan, blocks, inputs, forward pass, output head, sampling, outputs
    model     the forward pass and the output head, as the runner calls them, inputs and attention plan included

Target: at most 10 % of a step. The rest is Python that a larger model does not make longer.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.random_model import write_random_model
from benchmarks.shapes import LARGER
from millstream_runtime.config import Device, RuntimeConfig
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.request import Request, SamplingParams

RESULT = Path(__file__).parent / "results" / "engine_overhead.json"
DEMO_MODEL = Path(__file__).parent.parent / "models" / "demo-chat"
NUM_SEQS, STEPS, TARGET_SHARE = 16, 200, 0.1


class Stopwatch:
    """Adds up what calls take."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, timed."""

        def run(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args)
            finally:
                self.seconds += time.perf_counter() - start

        return run


def measure(folder: Path, sampling: SamplingParams) -> dict[str, float]:
    """Medians of steps, in milliseconds."""
    config = RuntimeConfig(
        model=str(folder),
        served_model_name="bench",
        device=Device.CPU,
        max_num_seqs=NUM_SEQS,
        enable_prefix_caching=False,
    )
    engine = Engine(config, lambda phase, message: None)
    engine.warm_up()
    watch, forward = Stopwatch(), engine._runner._forward
    forward.residual = watch.timed(forward.residual)  # type: ignore[method-assign]
    forward.logits = watch.timed(forward.logits)  # type: ignore[method-assign]
    for index in range(NUM_SEQS):
        engine.add_request(Request(str(index), [3 + index] * 16, sampling))
    for _ in range(10):
        engine.step()
    steps, in_model = [], []
    for _ in range(STEPS):
        watch.seconds, start = 0.0, time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - start)
        in_model.append(watch.seconds)
    outside = [step - model for step, model in zip(steps, in_model, strict=True)]
    return {
        "step_milliseconds": round(statistics.median(steps) * 1e3, 3),
        "model_milliseconds": round(statistics.median(in_model) * 1e3, 3),
        "outside_milliseconds": round(statistics.median(outside) * 1e3, 3),
        "share_outside": round(sum(outside) / sum(steps), 4),
    }


def main() -> None:
    """Measure, print, save."""
    most = STEPS + 20
    samplings = {
        "greedy": SamplingParams(most, temperature=0.0, ignore_eos=True),
        "seeded, top-p": SamplingParams(most, temperature=0.8, top_p=0.95, seed=1, ignore_eos=True),
    }
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        models = {"demo-chat": DEMO_MODEL} if (DEMO_MODEL / "config.json").exists() else {}
        models["random, 135 M parameters"] = write_random_model(Path(scratch) / "larger", LARGER)
        for model, folder in models.items():
            for name, sampling in samplings.items():
                one = measure(folder, sampling)
                results.append({"model": model, "sampling": name, **one})
                print(
                    f"{model:26} {name:14} step {one['step_milliseconds']:8.2f} ms   outside the model "
                    f"{one['outside_milliseconds']:6.2f} ms   {one['share_outside']:6.1%} of the time",
                    flush=True,
                )
    report = {"machine": machine.describe(), "num_seqs": NUM_SEQS, "target_share": TARGET_SHARE, "results": results}
    RESULT.write_text(json.dumps(report, indent=2) + "\n")
    print(f"saved {RESULT}")


if __name__ == "__main__":
    main()
