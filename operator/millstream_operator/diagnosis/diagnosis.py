"""A diagnosis: one stable reason and one or two sentences. Pure.

`pod_failures` finds one in the pods, `admission` in what the API server refuses, `service_probe` in the answers. "See
the pod's logs" is never the sentence: the runtime's own last error is in the pod's termination message.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from millstream_operator.diagnosis.reasons import Reason

MESSAGE_LIMIT_CHARACTERS = 1000


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`detail` says what is wrong, `hint` what to do or to wait for. Code reads these fields, never the message.

    `cause`: the words of the kubelet or of the API server that it was read from, where the code needs them.
    """

    reason: Reason
    detail: str
    hint: str = ""
    cause: str = field(default="", compare=False)

    @property
    def message(self) -> str:
        """What a person reads."""
        return f"{self.detail} {self.hint}" if self.hint else self.detail


def sentence(text: str) -> str:
    """One line with a full stop, cut where it is too long for a condition that people read.

    A pod's words may hold anything: half a surrogate pair, which the API server stores as another character, so that
    the status would be written again in every turn, or the control characters of a terminal.
    """
    text = _printable(" ".join(text.split()))
    if len(text) > MESSAGE_LIMIT_CHARACTERS:
        text = text[: MESSAGE_LIMIT_CHARACTERS - 1] + "…"
    return text if text.endswith((".", "…")) else f"{text}."


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
