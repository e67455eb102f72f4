"""Which drafts from the request itself stand: of the longest run that came before, and of the last three tokens.

    python -m benchmarks.request_drafts          # a minute on one core; --save writes results/request_drafts.json

No model computes: the answers are known texts, so every draft is judged at once and the figures are the same on every
machine. A check of k drafts is taken to cost 1 + 0.15 k decodes, as the demo model's do (docs/speculation.md).

    code, prose, chat     the second half of each held-out text behind its first half
    edited code           a text of the code slice again, its most frequent name replaced
    quoted sentences      the sentences of a prose text again, in another order
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from millstream_runtime.engine.speculation.ngram import continued, drafts_of
from millstream_runtime.engine.speculation.repeated_runs import RepeatedRuns
from millstream_runtime.tokenizing.tokenizer import Tokenizer

RESULT = Path(__file__).parent / "results" / "request_drafts.json"
MODELS = Path(__file__).parent.parent / "models"
DRAFT_COST = 0.15  # of a decode
MATCH_TOKENS = 3  # of n-grams of a fixed length
Draft = Callable[[list[int], int], list[int]]


class Workload(NamedTuple):
    """Prompts and their answers, as tokens."""

    name: str
    requests: list[tuple[list[int], list[int]]]


def by_longest_run() -> Draft:
    """Return the drafts of a new request, as the engine makes them."""
    runs = RepeatedRuns()

    def draft(known: list[int], most: int) -> list[int]:
        runs.read(known, len(known))
        return [*drafts_of(runs, known, most)]

    return draft


def by_n_grams() -> Draft:
    """Return the drafts of a new request, by its last MATCH_TOKENS tokens."""
    ends: dict[tuple[int, ...], int] = {}  # run of tokens -> the index behind it
    num_indexed = MATCH_TOKENS

    def draft(known: list[int], most: int) -> list[int]:
        nonlocal num_indexed
        for end in range(num_indexed, len(known)):
            ends[tuple(known[end - MATCH_TOKENS : end])] = end
        num_indexed = max(num_indexed, len(known))
        start = ends.get(tuple(known[-MATCH_TOKENS:]))
        return [] if start is None else continued(known, start, most)

    return draft


def workloads() -> Iterator[Workload]:
    """See above."""
    tokenizer, rng = Tokenizer.from_folder(MODELS / "demo-chat"), random.Random(1)
    texts: dict[str, list[str]] = {"code": [], "prose": [], "chat": []}
    for line in (MODELS / "held_out.jsonl").read_text().splitlines():
        one = json.loads(line)
        texts[one["slice"]].append(one.get("text") or "\n".join(said["content"] for said in one["messages"]))
    for name, some in texts.items():
        encoded = [list(tokenizer.encode(text)) for text in some]
        yield Workload(name, [(one[: len(one) // 2], one[len(one) // 2 :]) for one in encoded])
    edited = [(text, renamed(text)) for text in texts["code"]]
    quoted = []
    for text in texts["prose"]:
        sentences = re.split(r"(?<=\.)\s+", text)
        quoted.append((text, " ".join(rng.sample(sentences, len(sentences)))))
    for name, pairs in (("edited code", edited), ("quoted sentences", quoted)):
        yield Workload(name, [(list(tokenizer.encode(one)), list(tokenizer.encode(two))) for one, two in pairs])


def renamed(code: str) -> str:
    """Return the code with another name in place of the most frequent one."""
    names = sorted(set(re.findall(r"[a-z_]{4,}", code)))
    name = max(names, key=code.count)
    return re.sub(rf"\b{name}\b", f"{name}_2", code)


def measure(workload: Workload, make: Callable[[], Draft], most: int) -> dict[str, float]:
    """Answer all requests with at most `most` drafts per step."""
    num_steps = num_tokens = num_drafts = num_accepted = 0
    for prompt, answer in workload.requests:
        draft, done = make(), 1
        while done < len(answer):
            drafts = draft(prompt + answer[:done], min(most, len(answer) - done - 1))
            stood = next((place for place, one in enumerate(drafts) if one != answer[done + place]), len(drafts))
            num_steps, num_tokens = num_steps + 1, num_tokens + stood + 1
            num_drafts, num_accepted = num_drafts + len(drafts), num_accepted + stood
            done += stood + 1
    return {
        "tokens_per_step": round(num_tokens / num_steps, 2),
        "acceptance": round(num_accepted / max(1, num_drafts), 2),
        "ratio": round(num_tokens / (num_steps + DRAFT_COST * num_drafts), 2),
    }


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafts", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    results = []
    for workload in workloads():
        for most in args.drafts:
            for method, make in (("longest run", by_longest_run), ("three tokens", by_n_grams)):
                found = {"workload": workload.name, "drafts": most, "method": method, **measure(workload, make, most)}
                print(json.dumps(found), flush=True)
                results.append(found)
    if args.save:
        RESULT.write_text(json.dumps({"draft_cost": DRAFT_COST, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
