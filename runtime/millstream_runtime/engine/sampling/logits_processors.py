"""What changes logits before a token is drawn from them: bias, suppressed ids, penalties, and processors to come.

Everything here is sparse: only the logits that a request names are read and written, for all rows in one call, so
the cost follows the tokens concerned and not rows times vocabulary.

Order, as in vLLM: bias, suppression, penalties, processors; temperature and filters come after (`sampler`).
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Protocol

import torch
from torch import Tensor

from millstream_runtime.engine.request import SamplingParams


class LogitsProcessor(Protocol):
    """The seam for grammar-guided decoding. One object serves one request and may keep state between its tokens."""

    def __call__(self, logits: Tensor, generated_ids: Seq[int]) -> None:
        """Change `logits` `[vocab]` in place; minus infinity forbids a token, but at least one must stay finite.

        `generated_ids` is the answer so far; after a preemption the calls go on where they were.
        """


class LogitsRow(Protocol):
    """What the functions below read of `sampler.LogitsRow`."""

    @property
    def params(self) -> SamplingParams: ...
    @property
    def suppressed_ids(self) -> frozenset[int]: ...
    @property
    def token_counts(self) -> Mapping[int, int] | None: ...
    @property
    def generated_ids(self) -> Seq[int]: ...
    @property
    def processors(self) -> Seq[LogitsProcessor]: ...


def apply_all(logits: Tensor, rows: Seq[LogitsRow]) -> None:
    """Change `logits` `[R, vocab]` in place as the rows ask."""
    _add_bias(logits, rows)
    _suppress(logits, rows)
    _penalise(logits, rows)
    for index, row in enumerate(rows):
        for processor in row.processors:
            processor(logits[index], row.generated_ids)


def _add_bias(logits: Tensor, rows: Seq[LogitsRow]) -> None:
    biased = [(index, *pair) for index, row in enumerate(rows) for pair in row.params.logit_bias]
    if biased:
        at, ids, values = zip(*biased, strict=True)
        places = _places(logits, at, ids)
        logits[places] += torch.tensor(values, dtype=logits.dtype, device=logits.device)


def _suppress(logits: Tensor, rows: Seq[LogitsRow]) -> None:
    suppressed = [(index, token_id) for index, row in enumerate(rows) for token_id in sorted(row.suppressed_ids)]
    if suppressed:
        logits[_places(logits, *zip(*suppressed, strict=True))] = float("-inf")


def _penalise(logits: Tensor, rows: Seq[LogitsRow]) -> None:
    """OpenAI's presence and frequency penalties over the answer, and CTRL's repetition penalty over prompt and answer.

    The repetition penalty divides a positive logit and multiplies a negative one: both lower it.
    """
    at: list[int] = []
    ids: list[int] = []
    counts: list[int] = []
    for index, row in enumerate(rows):
        if row.token_counts:
            at += [index] * len(row.token_counts)
            ids += row.token_counts.keys()
            counts += row.token_counts.values()
    if not ids:
        return

    def each(values: list[float]) -> Tensor:
        return torch.tensor(values, device=logits.device)[places[0]]

    places = _places(logits, at, ids)
    times = torch.tensor(counts, dtype=torch.float32, device=logits.device)
    repetition = each([row.params.repetition_penalty for row in rows])
    frequency = each([row.params.frequency_penalty for row in rows])
    presence = each([row.params.presence_penalty for row in rows])
    picked = logits[places].float()
    picked = torch.where(picked > 0, picked / repetition, picked * repetition)
    picked -= frequency * times + presence * (times > 0)
    logits[places] = picked.to(logits.dtype)


def _places(logits: Tensor, rows: Seq[int], ids: Seq[int]) -> tuple[Tensor, Tensor]:
    return torch.tensor(rows, device=logits.device), torch.tensor(ids, device=logits.device)
