"""What speculation gains: the same answers with drafts and without, in turns within one run.

    python -m benchmarks.speculation                      # by n-grams, a draft model and an EAGLE head, the demo pair
    python -m benchmarks.speculation --only draft EAGLE   # by the draft model and the head alone
    python -m benchmarks.speculation --batch 1 8 64       # the same by several requests at once
    python -m benchmarks.speculation --oracle 0.5 0.7 0.9 # free drafts of which each stands with this probability
    python -m benchmarks.speculation --processor-time     # for a machine with other load: one thread's processor time

A round computes the answers with each setting in turn, each round beginning with another: without drafts, with each
fixed number of them, and with the governor, which learns for five seconds before the first. All compute with the
threads that the setting without drafts measured. Counted are steps without prompts. The ratio is tokens per second with
drafts over without, the median of the rounds. At batch 1 every answer must be the one without drafts, or the run ends
with an error; in larger batches those that differ are counted, since a batch of another size adds in another order.
`--save` replaces the saved results of the cases that ran.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import machine
from benchmarks.random_model import write_random_model
from benchmarks.shapes import LARGER
from millstream_runtime.config import Device, GovernorMode, RuntimeConfig, SpeculationMethod
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.request import Request, SamplingParams
from millstream_runtime.engine.scheduling import sequence as engine_sequence
from millstream_runtime.tokenizing.tokenizer import Tokenizer

RESULT = Path(__file__).parent / "results" / "speculation.json"
MODELS = Path(__file__).parent.parent / "models"
DEMO_MODEL, DEMO_DRAFT, DEMO_HEAD = (MODELS / name for name in ("demo-chat", "demo-draft", "demo-eagle"))
QUESTIONS = ("What is a KV cache?", "What is continuous batching?", "What does a readiness probe do?")
MOST_TOKENS, ORACLE_PROMPTS, ORACLE_TOKENS = 96, 3, 64
LEARNING_SECONDS = 5.0  # in which the governor is to follow another workload
Prompts = Sequence[Sequence[int]]
Answers = dict[str, list[int]]
Clock = Callable[[], float]


class Case(NamedTuple):
    """A workload. `oracle`: acceptance of drafts that cost nothing. `draft`: a draft model or head; None: n-grams."""

    name: str
    model: Path
    prompts: Prompts
    oracle: float | None = None
    draft: Path | None = None
    is_sampled: bool = False


class Oracle:
    """Knows the answers, and makes each draft wrong with the probability 1 - `acceptance`. It costs nothing."""

    is_free = True

    def __init__(self, answers: Mapping[tuple[int, ...], list[int]], acceptance: float) -> None:
        self._answers, self._acceptance, self._rng = answers, acceptance, random.Random(1)

    def propose(self, wanted: Mapping[engine_sequence.Sequence, int]) -> dict[engine_sequence.Sequence, list[int]]:
        """See `Drafter.propose`."""
        return {one: self._drafts(one, most) for one, most in wanted.items()}

    def forget(self, sequence: engine_sequence.Sequence) -> None:
        """See `Drafter.forget`."""

    def _drafts(self, sequence: engine_sequence.Sequence, most: int) -> list[int]:
        done = sequence.num_generated_tokens
        right = self._answers[tuple(sequence.request.prompt_token_ids)][done : done + most]
        return [one if self._rng.random() < self._acceptance else (one + 1) % 1000 for one in right]


class Side:
    """An engine with one setting. `clock`: what its steps are timed by, by the governor too."""

    def __init__(
        self,
        model: Path,
        draft_tokens: int,
        oracle: Oracle | None = None,
        *,
        governor: GovernorMode = GovernorMode.DISABLED,
        draft: Path | None = None,
        max_num_seqs: int = 16,
        clock: Clock = time.perf_counter,
    ) -> None:
        method = SpeculationMethod.EAGLE if draft == DEMO_HEAD else SpeculationMethod.DRAFT_MODEL
        method = SpeculationMethod.N_GRAM if draft is None else method
        config = RuntimeConfig(
            model=str(model),
            served_model_name="bench",
            device=Device.CPU,
            max_num_seqs=max_num_seqs,
            enable_prefix_caching=False,
            speculation_method=method if draft_tokens else SpeculationMethod.DISABLED,
            draft_model=str(draft) if draft is not None and draft_tokens else None,
            max_draft_tokens=draft_tokens or None,
            speculation_governor=governor,
        )
        self.draft_tokens, self.is_governed = draft_tokens, governor is GovernorMode.ENFORCE
        fixed = f"{draft_tokens} drafts" if draft_tokens else "off"
        self.name = f"governor, up to {draft_tokens} drafts" if self.is_governed else fixed
        self.clock = clock
        self.engine = Engine(config, lambda phase, message: None, drafter=oracle if draft_tokens else None)
        self.engine.step_clock = clock
        self.engine.warm_up()
        self.tokens_per_second: list[float] = []
        self.answers_that_differ = 0

    def answer(self, prompts: Prompts, batch: int, sampling: SamplingParams) -> Answers:
        """Answer all prompts, `batch` at once, and note the speed."""
        answers: Answers = {}
        seconds, tokens = 0.0, 0
        for start in range(0, len(prompts), batch):
            for index in range(start, min(start + batch, len(prompts))):
                answers[str(index)] = []
                self.engine.add_request(Request(str(index), prompts[index], sampling))
            while self.engine.has_work():
                began = self.clock()
                outputs = self.engine.step()
                took = self.clock() - began
                for output in outputs:
                    if output.token_id is not None:
                        answers[output.request_id].append(output.token_id)
                if all(output.prefill is None for output in outputs):
                    seconds, tokens = seconds + took, tokens + len(outputs)
        self.tokens_per_second.append(tokens / seconds)
        return answers

    def learn(self, prompts: Prompts, batch: int, sampling: SamplingParams) -> None:
        """Answer the prompts again and again, for LEARNING_SECONDS."""
        until = time.perf_counter() + LEARNING_SECONDS
        while time.perf_counter() < until:
            self.answer(prompts, batch, sampling)

    def report(self, off: Side) -> dict[str, Any]:
        """The medians of all rounds."""
        ratios = [mine / other for mine, other in zip(self.tokens_per_second, off.tokens_per_second, strict=True)]
        found: dict[str, Any] = {
            "setting": self.name,
            "tokens_per_second": round(statistics.median(self.tokens_per_second), 1),
            "ratio": round(statistics.median(ratios), 3),
            "ratios": [round(min(ratios), 3), round(max(ratios), 3)],
        }
        counts = self.engine.stats().speculation
        if counts is not None:
            found["acceptance"] = round(counts.num_accepted_tokens / max(1, counts.num_draft_tokens), 3)
            found["tokens_per_check"] = round(1 + counts.num_accepted_tokens / max(1, counts.num_checks), 2)
            if (governor := counts.governor) is not None:
                seconds = sum(governor.seconds_by_length)
                found["exploration_share"] = round(governor.exploration_seconds / seconds, 4) if seconds else 0.0
        if self.answers_that_differ:
            found["answers_that_differ"] = self.answers_that_differ
        return found


def conversation(model: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts of questions that are new, and of the same questions asked again behind all answers."""
    tokenizer, side = Tokenizer.from_folder(model), Side(model, 0)
    messages: list[dict[str, str]] = []
    first = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        first.append(tokenizer.encode_chat(messages))
        answer = side.answer([first[-1]], 1, SamplingParams(MOST_TOKENS, temperature=0.0))["0"]
        detokenizer = tokenizer.detokenizer()
        text = "".join(detokenizer.push(token) for token in answer[:-1]) + detokenizer.finish()
        messages.append({"role": "assistant", "content": text})
    again = [tokenizer.encode_chat([*messages, {"role": "user", "content": question}]) for question in QUESTIONS]
    return first, again


def compare(case: Case, args: argparse.Namespace, batch: int) -> list[Side]:
    """Run all settings in turns: without drafts, with each fixed number of them, and with the governor."""
    model, oracle, prompts = case.model, case.oracle, list(case.prompts) * batch
    sampling = SamplingParams(MOST_TOKENS, 1.0, seed=1) if case.is_sampled else SamplingParams(MOST_TOKENS, 0.0)
    answers: Answers = {}
    if oracle is not None:
        sampling = SamplingParams(ORACLE_TOKENS, temperature=0.0, ignore_eos=True)
        answers = Side(model, 0).answer(prompts, 1, sampling)
    known = {tuple(prompt): answers.get(str(index), []) for index, prompt in enumerate(prompts)}
    clock = time.thread_time if args.processor_time else time.perf_counter

    def side(draft_tokens: int, governor: GovernorMode) -> Side:
        drafter = Oracle(known, oracle) if oracle is not None else None
        most = max(args.batch)
        return Side(model, draft_tokens, drafter, governor=governor, draft=case.draft, max_num_seqs=most, clock=clock)

    sides = [side(count, GovernorMode.DISABLED) for count in (0, *args.drafts)]
    sides.append(side(max(args.drafts), GovernorMode.ENFORCE))
    for one in sides:  # each measured them by itself, and on a busy machine found others: that is no gain of drafts
        one.engine._policy.threads = sides[0].engine.threads  # type: ignore[misc]
    for turn in range(args.rounds + 1):
        first = turn % len(sides)
        for one in [*sides[first:], *sides[:first]]:
            found = one.answer(prompts, batch, sampling)
            answers = answers or found
            if found != answers and batch == 1:
                raise SystemExit(f"{one.name}: another answer than without drafts")
            one.answers_that_differ += sum(found[name] != answers[name] for name in answers)
        if not turn:  # the first round warms up
            for one in sides:
                if one.is_governed:
                    one.learn(prompts, batch, sampling)
                one.tokens_per_second.clear()
    return sides


def over_best_fixed(sides: Sequence[Side]) -> float:
    """The governor's tokens per second over those of the best fixed number of drafts, none included: the least of the
    ratios to each of them, each the median of the rounds, in which both ran next to one another."""
    *fixed, governed = sides
    ratios = [
        statistics.median(
            mine / other for mine, other in zip(governed.tokens_per_second, one.tokens_per_second, strict=True)
        )
        for one in fixed
    ]
    return round(min(ratios), 3)


def main() -> None:
    """Measure, print, save."""
    args = _parser().parse_args()
    if args.processor_time:
        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = "1"
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        cases = _oracle_cases(args, Path(scratch)) if args.oracle else _cases()
        for case in cases:
            if args.only and not case.name.startswith(tuple(args.only)):
                continue
            for batch in args.batch:
                results.append(_result(case, args, batch))
    if args.save:
        save(results)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--drafts", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--oracle", type=float, nargs="*", default=[])
    parser.add_argument("--larger", action="store_true", help="the oracle on random weights of 135 M parameters")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--processor-time", action="store_true", help="one thread's, not the time that passes")
    parser.add_argument("--only", nargs="*", default=[], help="workloads that begin with these words")
    parser.add_argument("--save", action="store_true")
    return parser


def _cases() -> list[Case]:
    first, again = conversation(DEMO_MODEL)
    some = [one for pair in zip(first, again, strict=True) for one in pair]
    return [
        Case("asks for the first time", DEMO_MODEL, first),
        Case("asks again", DEMO_MODEL, again),
        Case("some ask again", DEMO_MODEL, some),
        Case("samples at temperature 1", DEMO_MODEL, first, is_sampled=True),
        Case("draft model, asks for the first time", DEMO_MODEL, first, draft=DEMO_DRAFT),
        Case("draft model, samples at temperature 1", DEMO_MODEL, first, draft=DEMO_DRAFT, is_sampled=True),
        Case("EAGLE head, asks for the first time", DEMO_MODEL, first, draft=DEMO_HEAD),
        Case("EAGLE head, samples at temperature 1", DEMO_MODEL, first, draft=DEMO_HEAD, is_sampled=True),
    ]


def _oracle_cases(args: argparse.Namespace, scratch: Path) -> list[Case]:
    model = write_random_model(scratch / "larger", LARGER, torch.bfloat16) if args.larger else DEMO_MODEL
    rng = random.Random(2)
    prompts = [[rng.randrange(3, 1000) for _ in range(100)] for _ in range(ORACLE_PROMPTS)]
    shape = "135 M, oracle" if args.larger else "oracle"
    return [Case(f"{shape} {one}", model, prompts, one) for one in args.oracle]


def _result(case: Case, args: argparse.Namespace, batch: int) -> dict[str, Any]:
    """Measure one case and print it."""
    sides = compare(case, args, batch)
    found, ratio = [one.report(sides[0]) for one in sides], over_best_fixed(sides)
    for one in found:
        print(f"{case.name:38} batch {batch:2}  {json.dumps(one)}", flush=True)
    print(f"{case.name:38} batch {batch:2}  governor over the best fixed: {ratio}", flush=True)
    return {
        "case": case.name,
        "batch": batch,
        "rounds": args.rounds,
        "timed": "processor time of one thread" if args.processor_time else "wall time",
        "governor_over_best_fixed": ratio,
        "settings": found,
    }


def save(results: list[dict[str, Any]]) -> None:
    """Write the results, and keep those of cases that were not measured now: a case is one run on one machine."""
    found = {"machine": machine.describe()}
    kept = json.loads(RESULT.read_text())["results"] if RESULT.exists() else []
    rows = {(one["case"], one["batch"]): one for one in kept}
    rows |= {(one["case"], one["batch"]): found | one for one in results}
    RESULT.write_text(json.dumps({"results": [*rows.values()]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
