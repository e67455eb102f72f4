"""What speculation gains: the same answers with drafts and without, in turns within one run.

    python -m benchmarks.speculation                      # a conversation that asks again, n-grams, the demo model
    python -m benchmarks.speculation --batch 1 2 4        # the same by several requests at once
    python -m benchmarks.speculation --oracle 0.5 0.7 0.9 # free drafts of which each stands with this probability

A round computes the answers with each setting in turn, each round beginning with another. Counted is the time from the
first token of an answer to its last. The ratio is tokens per second with drafts over without, the median of the rounds.
Every answer must be the one without drafts, or the run ends with an error.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.random_model import write_random_model
from benchmarks.shapes import LARGER
from millstream_runtime.config import Device, RuntimeConfig, SpeculationMethod
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.request import Request, SamplingParams
from millstream_runtime.engine.scheduling import sequence as engine_sequence
from millstream_runtime.tokenizing.tokenizer import Tokenizer

RESULT = Path(__file__).parent / "results" / "speculation.json"
DEMO_MODEL = Path(__file__).parent.parent / "models" / "demo-chat"
QUESTIONS = ("What is a KV cache?", "What is continuous batching?", "What does a readiness probe do?")
MOST_TOKENS, ORACLE_PROMPTS, ORACLE_TOKENS = 96, 3, 64
Prompts = Sequence[Sequence[int]]
Answers = dict[str, list[int]]


class Oracle:
    """Knows the answers, and makes each draft wrong with the probability 1 - `acceptance`. It costs nothing."""

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
    """An engine with one setting."""

    def __init__(self, model: Path, draft_tokens: int, oracle: Oracle | None = None) -> None:
        config = RuntimeConfig(
            model=str(model),
            served_model_name="bench",
            device=Device.CPU,
            max_num_seqs=16,
            enable_prefix_caching=False,
            speculation_method=SpeculationMethod.N_GRAM if draft_tokens else SpeculationMethod.DISABLED,
            max_draft_tokens=draft_tokens or None,
        )
        self.name = f"{draft_tokens} drafts" if draft_tokens else "off"
        self.engine = Engine(config, lambda phase, message: None, drafter=oracle if draft_tokens else None)
        self.engine.warm_up()
        self.tokens_per_second: list[float] = []

    def answer(self, prompts: Prompts, batch: int, sampling: SamplingParams) -> Answers:
        """Answer all prompts, `batch` at once, and note the speed."""
        answers: Answers = {}
        seconds, tokens = 0.0, 0
        for start in range(0, len(prompts), batch):
            for index in range(start, min(start + batch, len(prompts))):
                answers[str(index)] = []
                self.engine.add_request(Request(str(index), prompts[index], sampling))
            while self.engine.has_work():
                began = time.perf_counter()
                outputs = self.engine.step()
                took = time.perf_counter() - began
                for output in outputs:
                    if output.token_id is not None:
                        answers[output.request_id].append(output.token_id)
                if all(output.prefill is None for output in outputs):
                    seconds, tokens = seconds + took, tokens + len(outputs)
        self.tokens_per_second.append(tokens / seconds)
        return answers

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


def compare(model: Path, prompts: Prompts, args: argparse.Namespace, batch: int, oracle: float | None) -> list[Any]:
    """Run all settings in turns; return a report of each."""
    sampling = SamplingParams(MOST_TOKENS, temperature=0.0)
    answers: Answers = {}
    if oracle is not None:
        sampling = SamplingParams(ORACLE_TOKENS, temperature=0.0, ignore_eos=True)
        answers = Side(model, 0).answer(prompts, 1, sampling)
    known = {tuple(prompt): answers.get(str(index), []) for index, prompt in enumerate(prompts)}
    sides = [Side(model, count, Oracle(known, oracle) if oracle is not None else None) for count in (0, *args.drafts)]
    for turn in range(args.rounds + 1):
        first = turn % len(sides)
        for side in [*sides[first:], *sides[:first]]:
            found = side.answer(prompts, batch, sampling)
            answers = answers or found
            if found != answers and batch == 1:
                raise SystemExit(f"{side.name}: another answer than without drafts")
        if not turn:  # the first round warms up
            for side in sides:
                side.tokens_per_second.clear()
    return [side.report(sides[0]) for side in sides]


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--drafts", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--oracle", type=float, nargs="*", default=[])
    parser.add_argument("--larger", action="store_true", help="the oracle on random weights of 135 M parameters")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        first, again = conversation(DEMO_MODEL)
        cases: list[tuple[str, Path, Prompts, float | None]] = [
            ("asks for the first time", DEMO_MODEL, first, None),
            ("asks again", DEMO_MODEL, again, None),
        ]
        model = write_random_model(Path(scratch) / "larger", LARGER) if args.larger else DEMO_MODEL
        rng = random.Random(2)
        random_prompts = [[rng.randrange(3, 1000) for _ in range(100)] for _ in range(ORACLE_PROMPTS)]
        if args.oracle:
            cases = [(f"oracle {one}", model, random_prompts, one) for one in args.oracle]
        for name, folder, prompts, oracle in cases:
            for batch in args.batch:
                found = compare(folder, list(prompts) * batch, args, batch, oracle)
                results.append({"case": name, "batch": batch, "settings": found})
                for one in found:
                    print(f"{name:24} batch {batch:2}  {json.dumps(one)}", flush=True)
    if args.save:
        RESULT.write_text(json.dumps({"machine": machine.describe(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
