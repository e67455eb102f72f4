"""What penalties cost per step, by where the tokens are counted.

    from the host    every token and its count as Python lists, copied to the device in each step
    vocabulary       counts of the whole vocabulary per row on the device, all three penalties on all logits
    entries          pairs of token and count on the device, as the engine does (`sampling/token_counts.py`)

All rows have a repetition, a presence and a frequency penalty. A step is penalties and counting the new token, without
sampling. Seconds of the processor, on one thread: the machine may be shared.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import machine
from millstream_runtime.engine.request import SamplingParams
from millstream_runtime.engine.sampling.logits_processors import apply_all
from millstream_runtime.engine.sampling.sampler import SamplingRow
from millstream_runtime.engine.sampling.token_counts import History, TokenCounts

RESULT = Path(__file__).parent / "results" / "penalties.json"
REPETITION, FREQUENCY, PRESENCE = 1.1, 0.1, 0.2
PARAMS = SamplingParams(
    1, repetition_penalty=REPETITION, frequency_penalty=FREQUENCY, presence_penalty=PRESENCE, temperature=0.0
)
SHAPES = [(16, 500, 49_152), (64, 4_000, 49_152), (64, 4_000, 151_936)]  # rows, tokens of each, vocabulary
STEPS = 9


def milliseconds(step: Callable[[], object]) -> float:
    """The shortest of several steps, the first not counted."""
    step()
    times = []
    for _ in range(STEPS):
        start = time.process_time()
        step()
        times.append(time.process_time() - start)
    return round(min(times) * 1e3, 3)


def from_host(logits: Tensor, histories: list[list[int]]) -> Callable[[], object]:
    """What the engine did before."""
    counted = [dict.fromkeys(tokens, 1) for tokens in histories]

    def step() -> None:
        at: list[int] = []
        ids: list[int] = []
        counts: list[int] = []
        for index, row in enumerate(counted):
            at += [index] * len(row)
            ids += row.keys()
            counts += row.values()
        places = torch.tensor(at), torch.tensor(ids)
        times = torch.tensor(counts, dtype=torch.float32)
        picked = logits[places]
        repetition, frequency, presence = (
            torch.full((len(counted),), value)[places[0]] for value in (REPETITION, FREQUENCY, PRESENCE)
        )
        picked = torch.where(picked > 0, picked / repetition, picked * repetition)
        logits[places] = picked - (frequency * times + presence * (times > 0))

    return step


def over_vocabulary(logits: Tensor, histories: list[list[int]], new: Tensor) -> Callable[[], object]:
    """Row by row, so that a row stays in the processor's cache."""
    counts = torch.zeros(logits.shape, dtype=torch.int32)
    for row, tokens in enumerate(histories):
        counts[row].index_fill_(0, torch.tensor(tokens), 1)
    rows = torch.arange(len(logits))

    def step() -> None:
        for row, count in zip(logits, counts, strict=True):
            seen = count > 0
            row.copy_(torch.where(seen, torch.where(row > 0, row / REPETITION, row * REPETITION), row))
            row.sub_(count, alpha=FREQUENCY).sub_(seen.float(), alpha=PRESENCE)
        counts[rows, new] += 1

    return step


def as_entries(logits: Tensor, histories: list[list[int]], new: Tensor) -> tuple[Callable[[], object], TokenCounts]:
    """The engine's own."""
    counts, known = TokenCounts(len(logits), logits.device), [list(tokens) for tokens in histories]

    def step() -> None:
        all_of = [History(row, row, tokens, len(tokens), True) for row, tokens in enumerate(known)]
        counted = counts.select(all_of)
        apply_all(logits, [SamplingRow(PARAMS, 0, 0, history=one) for one in all_of], counted)
        counted.add(new)
        for tokens, token in zip(known, new.tolist(), strict=True):
            tokens.append(token)

    return step, counts


def measure(num_rows: int, num_tokens: int, vocab_size: int) -> dict[str, Any]:
    """Each of the three on one shape."""
    torch.manual_seed(1)
    logits, new = torch.randn(num_rows, vocab_size), torch.randint(vocab_size, (num_rows,))
    histories = [torch.randperm(vocab_size)[:num_tokens].tolist() for _ in range(num_rows)]
    entries, counts = as_entries(logits, histories, new)
    return {
        "rows": num_rows,
        "tokens_per_row": num_tokens,
        "vocab_size": vocab_size,
        "from_host_milliseconds": milliseconds(from_host(logits, histories)),
        "vocabulary_milliseconds": milliseconds(over_vocabulary(logits, histories, new)),
        "entries_milliseconds": milliseconds(entries),
        "vocabulary_bytes": num_rows * vocab_size * 4,
        "entries_bytes": counts.num_bytes,
    }


def main() -> None:
    """Measure, print, save."""
    torch.set_num_threads(1)
    results = []
    for shape in SHAPES:
        results.append(measure(*shape))
        print(results[-1], flush=True)
    RESULT.write_text(json.dumps({"machine": machine.describe(), "results": results}, indent=2) + "\n")
    print(f"saved {RESULT}")


if __name__ == "__main__":
    main()
