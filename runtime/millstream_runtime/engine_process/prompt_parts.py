"""The log-probabilities of a long prompt as messages of PART_TOKENS each, ahead of the step that they belong to.

    StepDone(prefill of 300 tokens)  ->  PromptLogprobs(128), PromptLogprobs(128), PromptLogprobs(44), StepDone

To decode one message takes a turn of the HTTP process's event loop. For 8,192 tokens with 20 alternatives that would be
0.1 s, in which no other client has a turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec

from millstream_runtime.engine.request import TokenLogprobs, TokenOutput
from millstream_runtime.engine_process.messages import Event, PromptLogprobs, StepDone

PART_TOKENS = 128


def in_parts(event: Event) -> Iterator[Event]:
    """The messages that `event` is sent as: itself, where no prompt in it is long."""
    if not isinstance(event, StepDone) or not any(map(_is_long, event.outputs)):
        yield event
        return
    outputs: list[TokenOutput] = []
    for output in event.outputs:
        if not _is_long(output) or output.prefill is None:
            outputs.append(output)
            continue
        entries = output.prefill.prompt_logprobs or ()
        for first in range(0, len(entries), PART_TOKENS):
            yield PromptLogprobs(output.request_id, entries[first : first + PART_TOKENS])
        outputs.append(replace(output, prefill=replace(output.prefill, prompt_logprobs=())))
    yield msgspec.structs.replace(event, outputs=tuple(outputs))


def _is_long(output: TokenOutput) -> bool:
    return output.prefill is not None and len(output.prefill.prompt_logprobs or ()) > PART_TOKENS


class PromptParts:
    """Puts the parts back into their step, on the other side."""

    def __init__(self) -> None:
        self._entries: dict[str, list[TokenLogprobs | None]] = {}

    def add(self, part: PromptLogprobs) -> None:
        """Keep a part until its step arrives."""
        self._entries.setdefault(part.request_id, []).extend(part.entries)

    def complete(self, step: StepDone) -> StepDone:
        """The step as the engine made it."""
        if not self._entries:
            return step
        known, self._entries = self._entries, {}
        outputs = tuple(
            replace(output, prefill=replace(output.prefill, prompt_logprobs=tuple(known[output.request_id])))
            if output.prefill is not None and output.request_id in known
            else output
            for output in step.outputs
        )
        return msgspec.structs.replace(step, outputs=outputs)
