"""What the key of the operator's probe may ask of a model: one token for one short prompt. Pure.

The operator sends model, prompt, max_tokens and temperature. A request with a priority, a bias or log-probabilities is
no probe.
"""

from __future__ import annotations

from millstream_runtime.server.http.limits import MAX_PROBE_PROMPT
from millstream_runtime.server.openai.requests import CompletionRequest

FIELDS = frozenset({"model", "prompt", "max_tokens", "n", "temperature", "seed", "stream"})


def is_probe(body: CompletionRequest) -> bool:
    """Whether the request is no more than a probe."""
    return (
        body.model_fields_set <= FIELDS
        and body.max_tokens == 1
        and body.n == 1
        and len(body.prompt) == 1
        and len(body.prompt[0]) <= MAX_PROBE_PROMPT
    )
