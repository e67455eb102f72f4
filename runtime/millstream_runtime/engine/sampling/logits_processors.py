"""What changes logits before a token is drawn from them: bias, suppressed ids, penalties, and processors to come.

Everything here is sparse: only the logits that a request names are read and written, for all rows in one call, so
the cost follows the tokens concerned and not rows times vocabulary. It is done in float32: in bfloat16 a logit of 20 is
the same after a penalty of 0.05.

Order, as in vLLM: bias, suppression, penalties, processors; temperature and filters come after (`sampler`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import torch
from torch import Tensor

from millstream_runtime.engine.request import SamplingParams
from millstream_runtime.engine.sampling.checked_counts import CheckedRows
from millstream_runtime.engine.sampling.token_counts import CountedRows, History
from millstream_runtime.engine.transfer import on_device


class LogitsProcessor(Protocol):
    """The seam for grammar-guided decoding. One object serves one request and may keep state between its tokens.

    One with an attribute `follows_generated_ids` that is True does what follows from `generated_ids`, whichever calls
    came before: the rows of a step that checks drafts are processed one after another, and some of them are dropped.
    Requests with any other processor do not draft.
    """

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
    def history(self) -> History | None: ...
    @property
    def generated_ids(self) -> Seq[int]: ...
    @property
    def processors(self) -> Seq[LogitsProcessor]: ...


def apply_all(logits: Tensor, rows: Seq[LogitsRow], counted: CountedRows | CheckedRows | None = None) -> None:
    """Change `logits` `[R, vocab]` float32, contiguous, in place as the rows ask.

    `counted`: the tokens of those rows that have a history; None where none has.
    """
    _add_bias(logits, rows)
    _suppress(logits, rows)
    if counted is not None:
        _penalise(logits, rows, counted)
    for index, row in enumerate(rows):
        for processor in row.processors:
            processor(logits[index], row.generated_ids)


def _add_bias(logits: Tensor, rows: Seq[LogitsRow]) -> None:
    biased = [(index, *pair) for index, row in enumerate(rows) for pair in row.params.logit_bias]
    if biased:
        at, ids, values = zip(*biased, strict=True)
        places = _places(logits, at, ids)
        logits[places] += on_device(values, logits.device, logits.dtype)


def _suppress(logits: Tensor, rows: Seq[LogitsRow]) -> None:
    suppressed = [(index, token_id) for index, row in enumerate(rows) for token_id in sorted(row.suppressed_ids)]
    if suppressed:
        places = _places(logits, *zip(*suppressed, strict=True))
        logits.index_put_(places, logits.new_full((), float("-inf")))


def _penalise(logits: Tensor, rows: Seq[LogitsRow], counted: CountedRows | CheckedRows) -> None:
    """OpenAI's presence and frequency penalties over the answer, and CTRL's repetition penalty over prompt and answer.

    The repetition penalty divides a positive logit and multiplies a negative one: both lower it. Equal tokens of a row
    are counted equally, so each of them is written the same value.
    """
    at = [index for index, row in enumerate(rows) if row.history is not None]
    params = [rows[index].params for index in at]
    penalties = on_device(
        [
            [one.repetition_penalty for one in params],
            [one.frequency_penalty for one in params],
            [one.presence_penalty for one in params],
        ],
        logits.device,
    )
    repetition, frequency, presence = penalties.index_select(1, counted.places)[:, :, None]
    first = on_device([index * logits.shape[-1] for index in at], logits.device).index_select(0, counted.places)
    places = (counted.ids + first[:, None]).view(-1)
    logits = logits.view(-1)
    picked = logits.index_select(0, places).view(counted.ids.shape)
    picked = torch.where(picked > 0, picked / repetition, picked * repetition)
    picked -= frequency * counted.counts + presence * (counted.counts > 0)
    logits.scatter_(0, places, picked.view(-1))


def _places(logits: Tensor, rows: Seq[int], ids: Seq[int]) -> tuple[Tensor, Tensor]:
    at = on_device([rows, ids], logits.device)
    return at[0], at[1]
