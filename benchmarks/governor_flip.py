"""How soon the governor follows a workload that changes, on the real engine with the demo model.

    python -m benchmarks.governor_flip          # n-grams, then a draft model, for one request at once and for four
    python -m benchmarks.governor_flip --save   # also to results/governor_flip.json

Two workloads follow each other: a conversation that asks its questions again, which drafts answer, and random prompts
continued at temperature 1, of which they guess little. N-grams propose next to nothing for random text, so that little
is left to decide; a draft model proposes as much for both, so what changes is what the governor lets be checked. The
length of a step is its drafts per decode; that of a workload is the mean over the second halves of its phases. A flip
is followed when the mean of WINDOW_SECONDS of steps is nearer to the new workload's length than to the old one's, and
stays so for the rest of the phase. Counted are the seconds of steps without prompts. Exit status 1: a flip took more
than LIMIT_SECONDS.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import machine
from benchmarks.speculation import DEMO_DRAFT, DEMO_MODEL, MOST_TOKENS, Side, conversation
from millstream_runtime.config import GovernorMode
from millstream_runtime.engine.request import Request, SamplingParams

RESULT = Path(__file__).parent / "results" / "governor_flip.json"
LIMIT_SECONDS, WINDOW_SECONDS = 5.0, 0.5
MOST_DRAFTS, RANDOM_PROMPT_TOKENS = 8, 100
LEAST_DIFFERENCE = 0.5  # drafts per decode between the workloads, or nothing is followed
AGAIN, RANDOM = "asks again", "random text"
DRAFTS = {"n-grams": None, "draft model": DEMO_DRAFT}


class Step(NamedTuple):
    """One step of decodes alone. `proposed`, `checked`: drafts per decode."""

    seconds: float
    tokens: int
    proposed: float
    checked: float


@dataclass(frozen=True, slots=True)
class Phase:
    """What was decoded of one workload before the next."""

    workload: str
    steps: list[Step]

    @property
    def second_half(self) -> list[Step]:
        """The steps behind half of its seconds."""
        half, ends = sum(one.seconds for one in self.steps) / 2, itertools.accumulate(one.seconds for one in self.steps)
        return [one for one, end in zip(self.steps, ends, strict=True) if end > half]


def mean_length(steps: list[Step]) -> float:
    """Drafts per decode, by the time that steps took."""
    return sum(one.seconds * one.checked for one in steps) / sum(one.seconds for one in steps)


def seconds_to_follow(steps: list[Step], before: float, after: float, window_seconds: float = WINDOW_SECONDS) -> float:
    """Return the seconds from the first step until the mean length of a window is nearer to `after` for good.

    All seconds of the phase where it never is. `before`, `after`: lengths of the workloads.
    """
    middle, now, followed = (before + after) / 2, 0.0, 0.0
    window: list[Step] = []
    for step in steps:
        now += step.seconds
        window.append(step)
        while len(window) > 1 and sum(one.seconds for one in window[1:]) >= window_seconds:
            del window[0]
        length = mean_length(window)
        is_new = length > middle if after > before else length < middle
        if not is_new:
            followed = now
    return followed


class Watch:
    """Counts what is proposed and what the governor lets be checked, of each step."""

    def __init__(self, side: Side) -> None:
        drafting = side.engine._drafting
        if drafting is None:
            raise ValueError("the engine does not speculate")
        self.proposed = self.checked = 0
        choose = drafting.lengths.choose

        def choose_and_count(most: Any, num_decodes: int, **how: Any) -> Any:
            chosen = choose(most, num_decodes, **how)
            self.proposed, self.checked = sum(most.values()), sum(chosen.values())
            return chosen

        drafting.lengths.choose = choose_and_count  # type: ignore[method-assign]


def run_phase(
    side: Side, watch: Watch, workload: str, requests: Iterator[Request], batch: int, seconds: float
) -> Phase:
    """Answer requests, `batch` at once, for so many seconds of decoding."""
    phase, decoded, engine = Phase(workload, []), 0.0, side.engine
    while decoded < seconds:
        for request in itertools.islice(requests, batch):
            engine.add_request(request)
        while engine.has_work():
            watch.proposed = watch.checked = 0
            num_decodes = engine.stats().num_requests_running
            began = time.perf_counter()
            outputs = engine.step()
            took = time.perf_counter() - began
            if num_decodes and all(output.prefill is None for output in outputs):
                decoded += took
                lengths = watch.proposed / num_decodes, watch.checked / num_decodes
                phase.steps.append(Step(took, len(outputs), *lengths))
    return phase


def asking_again() -> Iterator[Request]:
    """Greedy, without an end."""
    _, again = conversation(DEMO_MODEL)
    greedy = SamplingParams(MOST_TOKENS, temperature=0.0)
    for number in itertools.count():
        yield Request(f"again-{number}", again[number % len(again)], greedy)


def random_text(vocab_size: int) -> Iterator[Request]:
    """Random prompts, continued at temperature 1; another seed each."""
    rng = random.Random(2)
    for number in itertools.count():
        prompt = [rng.randrange(3, vocab_size) for _ in range(RANDOM_PROMPT_TOKENS)]
        yield Request(f"random-{number}", prompt, SamplingParams(MOST_TOKENS, 1.0, seed=number, ignore_eos=True))


def measure(drafts: str, batch: int, phases: int, seconds: float) -> dict[str, Any]:
    """Run the phases in turn; return how long each flip took to be followed."""
    governed = GovernorMode.ENFORCE
    side = Side(DEMO_MODEL, MOST_DRAFTS, governor=governed, draft=DRAFTS[drafts], max_num_seqs=batch)
    watch, sources = Watch(side), {AGAIN: asking_again(), RANDOM: random_text(side.engine.model_config.vocab_size)}
    names = [(AGAIN, RANDOM)[number % 2] for number in range(phases)]
    done: list[Phase] = []
    for name in names:
        done.append(run_phase(side, watch, name, sources[name], batch, seconds))
        length = mean_length(done[-1].second_half)
        print(f"{drafts}, batch {batch}, {name}: {length:.2f} drafts per decode in the second half", flush=True)
    return {"drafts": drafts} | report(batch, done)


def report(batch: int, phases: list[Phase]) -> dict[str, Any]:
    """What was found, as it is saved."""
    halves = {
        name: [one for phase in phases if phase.workload == name for one in phase.second_half]
        for name in (AGAIN, RANDOM)
    }
    length = {name: mean_length(steps) for name, steps in halves.items()}
    if length[AGAIN] - length[RANDOM] < LEAST_DIFFERENCE:
        raise SystemExit(f"both workloads have the same length, so nothing can be followed: {length}")
    flips: list[dict[str, Any]] = [
        {
            "to": new.workload,
            "seconds": round(seconds_to_follow(new.steps, length[old.workload], length[new.workload]), 3),
        }
        for old, new in itertools.pairwise(phases)
    ]
    seconds = [float(one["seconds"]) for one in flips]
    return {
        "batch": batch,
        "phases": len(phases),
        "workloads": {name: _workload(steps) for name, steps in halves.items()},
        "flips": flips,
        "median_seconds": statistics.median(seconds),
        "slowest_seconds": max(seconds),
    }


def _workload(steps: list[Step]) -> dict[str, float]:
    seconds = sum(one.seconds for one in steps)
    return {
        "checked_drafts_per_decode": round(mean_length(steps), 2),
        "proposed_drafts_per_decode": round(sum(one.seconds * one.proposed for one in steps) / seconds, 2),
        "tokens_per_second": round(sum(one.tokens for one in steps) / seconds, 1),
    }


def main() -> int:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafts", nargs="+", default=[*DRAFTS], choices=DRAFTS)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--phases", type=int, default=7, help="workloads in turn; a flip lies between two")
    parser.add_argument("--seconds", type=float, default=12.0, help="of decoding, per phase")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    results = []
    for drafts, batch in itertools.product(args.drafts, args.batch):
        results.append(measure(drafts, batch, args.phases, args.seconds))
        print(json.dumps(results[-1]), flush=True)
    slowest = max(one["slowest_seconds"] for one in results)
    print(f"the slowest of all flips was followed after {slowest:.2f} s of decoding; the limit is {LIMIT_SECONDS:g} s")
    if args.save:
        found = {"machine": machine.describe(), "limit_seconds": LIMIT_SECONDS, "seconds_per_phase": args.seconds}
        RESULT.write_text(json.dumps(found | {"results": results}, indent=1) + "\n")
    return int(slowest > LIMIT_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
