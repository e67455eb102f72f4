"""Overlapped steps: step N + 1 is launched before the tokens of step N are read.

    host     launch N    launch N+1  read N   launch N+2  read N+1        plain: launch N, read N, launch N+1, ...
    device   [ step N ............ ][ step N+1 ......... ][ step N+2

So the device never waits for the host to plan, to read and to send. The cost: the host plans a step without the tokens
of the one before. It knows that a token will come, so lengths, blocks and positions are known; the token's value is on
the device (`last_tokens`), and UNREAD stands for it in `Sequence.token_ids`. Three things follow.

* A sequence that ends by the value of a token (end-of-sequence, a stop id, NaN, an abort) is part of one more step,
  whose token is dropped. An end by length is known beforehand.
* While a step that writes to a sequence's blocks is in flight, the sequence keeps the blocks: they are freed when the
  last of its steps has been read. So no other request reads what that step writes, and after NaN the blocks are zeroed
  first. For the same reason a plan that must preempt reads first, and then plans again.
* A block is published to the prefix cache once all its tokens are read: it never holds one that was not accepted.

Some sequences need the token itself before their next step. `reason_to_wait` is the rule; where it gives a reason, the
step before is read first, which is the plain loop for as long as it lasts. While an engine speculates all of its steps
wait (`Wait.DRAFTS`): drafts follow the last token, and how many of them stood says how long a sequence is.

One step is in flight at most when a step is planned. Design: mini-sglang's overlap scheduler, vLLM's async scheduling.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from millstream_runtime.engine.device_events import StepSpan
from millstream_runtime.engine.execution.model_runner import Launched
from millstream_runtime.engine.scheduling.pacing import StepTime
from millstream_runtime.engine.scheduling.sequence import Sequence
from millstream_runtime.engine.scheduling.step_plan import Chunk


class Wait(StrEnum):
    """Why a step's tokens are read before the next is launched."""

    PROCESSORS = "logits_processors"
    RECOMPUTE = "recompute"
    DRAFTS = "drafts"


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step that was launched and not read."""

    launched: Launched
    chunks: list[Chunk]
    prompt_tokens: int  # of users' prompts, that it computes
    shape: StepTime | None  # without its seconds; None without a pace that learns from them
    began_at_seconds: float
    span: StepSpan | None = None  # its time on the device; None: the host's clock says it


def reason_to_wait(sequence: Sequence, *, must_recompute: bool) -> Wait | None:
    """Return why the last token of `sequence` must be read before the next step is launched; None: it need not.

    `must_recompute`: that token makes all its cached keys stale (longrope), so there is nothing to launch with them.

    Not a reason: `min_tokens`, which counts tokens and does not look at them; a seed, which is hashed with the
    position; temperature and filters; penalties, whose tokens are counted on the device (`token_counts`);
    log-probabilities, which are read with their token.
    """
    if not sequence.num_unread_tokens or sequence.has_ended or sequence.is_complete:
        return None
    if sequence.processors:
        return Wait.PROCESSORS
    return Wait.RECOMPUTE if must_recompute else None


def reasons_to_wait(sequences: Iterable[tuple[Sequence, bool]], *, drafts: bool = False) -> set[Wait]:
    """Return the reasons of all sequences of the step in flight, each with `must_recompute`; empty: launch the next.

    `drafts`: decodes of the next step may draft, whatever sequences the step in flight has.
    """
    reasons = (reason_to_wait(sequence, must_recompute=must_recompute) for sequence, must_recompute in sequences)
    return {reason for reason in reasons if reason is not None} | ({Wait.DRAFTS} if drafts else set())
