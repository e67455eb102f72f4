"""What the engine adds to the model: the share of a step of 16 decodes that is not spent in the model's own code.

    step      plan, blocks, inputs, forward pass, output head, sampling, outputs
    model     the forward pass and the output head, as the runner calls them, inputs and attention plan included

Target: at most 10 % of a step. The rest is Python that a larger model does not make longer.

Checks of drafts may add 5 % of a step to it. An engine that knows the answers, whose drafts cost nothing, and one
without drafts take steps in turns; what proposing takes is left out, what the governor takes is not. A step of checks
has more rows and gives more tokens.
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
from benchmarks.speculation import Oracle
from millstream_runtime.config import Device, GovernorMode, RuntimeConfig, SpeculationMethod
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.request import Request, SamplingParams

RESULT = Path(__file__).parent / "results" / "engine_overhead.json"
DEMO_MODEL = Path(__file__).parent.parent / "models" / "demo-chat"
NUM_SEQS, STEPS, TARGET_SHARE, FIRST_STEPS = 16, 200, 0.1, 10
DRAFT_TOKENS, ACCEPTANCE, TARGET_ADDED_SHARE = 4, 0.7, 0.05
PROMPTS = [[3 + index] * 16 for index in range(NUM_SEQS)]


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


class Measured:
    """An engine whose steps are timed, all and in the model. `oracle`: what proposes drafts to it; None: nothing."""

    def __init__(self, folder: Path, oracle: Oracle | None = None) -> None:
        config = RuntimeConfig(
            model=str(folder),
            served_model_name="bench",
            device=Device.CPU,
            max_num_seqs=NUM_SEQS,
            enable_prefix_caching=False,
            speculation_method=SpeculationMethod.DISABLED if oracle is None else SpeculationMethod.N_GRAM,
            max_draft_tokens=None if oracle is None else DRAFT_TOKENS,
            speculation_governor=GovernorMode.OBSERVE,  # all drafts are checked, and it learns from them
        )
        self.engine = Engine(config, lambda phase, message: None, drafter=oracle)
        self.engine.warm_up()
        self._model, self._proposing, forward = Stopwatch(), Stopwatch(), self.engine._runner._forward
        forward.residual = self._model.timed(forward.residual)  # type: ignore[method-assign]
        forward.logits = self._model.timed(forward.logits)  # type: ignore[method-assign]
        if oracle is not None:
            oracle.propose = self._proposing.timed(oracle.propose)  # type: ignore[method-assign]
        self.steps: list[float] = []
        self.in_model: list[float] = []
        self.answers: dict[tuple[int, ...], list[int]] = {}

    def begin(self, sampling: SamplingParams) -> None:
        """Take all requests, and a few steps that are not timed."""
        self.answers = {tuple(prompt): [] for prompt in PROMPTS}
        for index, prompt in enumerate(PROMPTS):
            self.engine.add_request(Request(str(index), prompt, sampling))
        for _ in range(FIRST_STEPS):
            self.step()
        self.steps, self.in_model = [], []

    def step(self) -> bool:
        """Take a step. Whether all requests are still running."""
        self._model.seconds, self._proposing.seconds, start = 0.0, 0.0, time.perf_counter()
        outputs = self.engine.step()
        self.steps.append(time.perf_counter() - start - self._proposing.seconds)
        self.in_model.append(self._model.seconds)
        for output in outputs:
            if output.token_id is not None:
                self.answers[tuple(PROMPTS[int(output.request_id)])].append(output.token_id)
        return all(output.finish_reason is None for output in outputs)

    @property
    def outside(self) -> list[float]:
        """Seconds of each step that are not spent in the model's own code."""
        return [step - model for step, model in zip(self.steps, self.in_model, strict=True)]


def measure(folder: Path, sampling: SamplingParams) -> dict[str, float]:
    """Medians of steps, in milliseconds."""
    one = Measured(folder)
    one.begin(sampling)
    for _ in range(STEPS):
        one.step()
    return {
        "step_milliseconds": _milliseconds(one.steps),
        "model_milliseconds": _milliseconds(one.in_model),
        "outside_milliseconds": _milliseconds(one.outside),
        "share_outside": round(sum(one.outside) / sum(one.steps), 4),
    }


def measure_checks(folder: Path, sampling: SamplingParams, acceptance: float = ACCEPTANCE) -> dict[str, float]:
    """Medians of steps with checks and without, in milliseconds; what checks add outside the model, over their step."""
    plain = Measured(folder)
    plain.begin(sampling)
    while plain.engine.has_work():
        plain.step()
    checking = Measured(folder, Oracle(dict(plain.answers), acceptance))
    checking.engine._policy.threads = plain.engine.threads  # type: ignore[misc]  # as in `speculation.compare`
    for one in (plain, checking):
        one.begin(sampling)
    while checking.step():
        plain.step()
    del checking.steps[-1], checking.in_model[-1]  # in it a request ended
    added = statistics.median(checking.outside) - statistics.median(plain.outside)
    return {
        "steps": len(checking.steps),
        "tokens_per_check": _tokens_per_check(checking.engine),
        "step_milliseconds": _milliseconds(plain.steps),
        "outside_milliseconds": _milliseconds(plain.outside),
        "step_with_checks_milliseconds": _milliseconds(checking.steps),
        "outside_with_checks_milliseconds": _milliseconds(checking.outside),
        "added_share": round(added / statistics.median(checking.steps), 4),
    }


def _milliseconds(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 3)


def _tokens_per_check(engine: Engine) -> float:
    counts = engine.stats().speculation
    if counts is None or not counts.num_checks:
        raise RuntimeError("the engine has checked no draft")
    return round(1 + counts.num_accepted_tokens / counts.num_checks, 2)


def main() -> None:
    """Measure, print, save."""
    most = STEPS + 20
    samplings = {
        "greedy": SamplingParams(most, temperature=0.0, ignore_eos=True),
        "seeded, top-p": SamplingParams(most, temperature=0.8, top_p=0.95, seed=1, ignore_eos=True),
    }
    results: list[dict[str, Any]] = []
    checks: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        models = {"demo-chat": DEMO_MODEL} if (DEMO_MODEL / "config.json").exists() else {}
        models["random, 135 M parameters"] = write_random_model(Path(scratch) / "larger", LARGER)
        for model, folder in models.items():
            for name, sampling in samplings.items():
                one = measure(folder, sampling)
                results.append({"model": model, "sampling": name, **one})
                _print(model, name, one["step_milliseconds"], one["outside_milliseconds"], one["share_outside"])
                one = measure_checks(folder, sampling)
                checks.append({"model": model, "sampling": name, **one})
                step, outside = one["step_with_checks_milliseconds"], one["outside_with_checks_milliseconds"]
                _print(model, f"{name}, checks", step, outside, one["added_share"], "added by checks")
    report = {
        "machine": machine.describe(),
        "num_seqs": NUM_SEQS,
        "target_share": TARGET_SHARE,
        "results": results,
        "draft_tokens": DRAFT_TOKENS,
        "target_added_share": TARGET_ADDED_SHARE,
        "checks": checks,
    }
    RESULT.write_text(json.dumps(report, indent=2) + "\n")
    print(f"saved {RESULT}")


def _print(model: str, name: str, step: float, outside: float, share: float, of: str = "of the time") -> None:
    print(
        f"{model:26} {name:22} step {step:8.2f} ms   outside the model {outside:6.2f} ms   {share:6.1%} {of}",
        flush=True,
    )


if __name__ == "__main__":
    main()
