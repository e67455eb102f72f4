"""A diagnosis: one stable reason and one sentence. Pure.

Who finds one: `pod_failures` in the pods, `admission` in what the API server refuses, `service_probe` in the answers.
"See the pod's logs" is never the sentence: the runtime's own last error is in the pod's termination message.
"""

from __future__ import annotations

from dataclasses import dataclass

from millstream_operator.diagnosis.reasons import Reason

MESSAGE_LIMIT_CHARACTERS = 1000


@dataclass(frozen=True, slots=True)
class Diagnosis:
    reason: Reason
    message: str


def sentence(text: str) -> str:
    """One line with a full stop, cut where it is too long for a condition that people read."""
    text = " ".join(text.split())
    if len(text) > MESSAGE_LIMIT_CHARACTERS:
        text = text[: MESSAGE_LIMIT_CHARACTERS - 1] + "…"
    return text if text.endswith((".", "…")) else f"{text}."
