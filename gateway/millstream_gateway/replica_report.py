"""What one replica reports of its load, as the picker keeps it: the body of its `/load`, read strictly.

    {"boot_id": "3f…", "phase": "Ready",
     "requests": {"queued": 0, "running": 3}, "tokens": {"queued": 0, "running": 4100},
     "kv": {"free_blocks": 5120, "total_blocks": 6400, "block_size_tokens": 16},
     "prefill_tokens_per_second": 8100.0, "itl_seconds": 0.011,
     "answers": [{"id": "9b…", "prompt_tokens": 900, "cached_tokens": 640, "completion_tokens": 80}]}

A replica is another process, so nothing it says is believed to be well-formed. Fields that are not named here are left
alone: a newer runtime may report more.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

SERVING_PHASE = "Ready"
MOST_COUNT = 10**12  # of tokens, blocks, requests: more is a lie or a mistake
MOST_RATE = 1e9
MOST_ANSWERS = 256


class ReportError(ValueError):
    """A report cannot be used; the message names the field and the value."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one answered request took. `id`: see `id_hash`."""

    id: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """`queued_tokens`: of prompts, to be computed before first tokens. None: that was not measured yet."""

    boot_id: str
    phase: str
    queued_requests: int = 0
    running_requests: int = 0
    queued_tokens: int = 0
    running_tokens: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    block_size_tokens: int = 1
    prefill_tokens_per_second: float | None = None
    itl_seconds: float | None = None

    @property
    def capacity_tokens(self) -> int:
        """Return how many tokens its KV cache holds."""
        return self.total_blocks * self.block_size_tokens

    @property
    def free_tokens(self) -> int:
        """Return the tokens of blocks that no running request holds; the prefix cache may remember them."""
        return self.free_blocks * self.block_size_tokens


@dataclass(frozen=True, slots=True)
class Replica:
    """An endpoint, and what it reported last. `report` None: it has not answered yet. Seconds of the picker's clock."""

    endpoint: str  # ip:port
    report: ReplicaReport | None = None
    reported_at_seconds: float = 0.0

    @property
    def is_serving(self) -> bool:
        """Whether it may be picked: one that has not reported yet may, since its Pod is Ready."""
        return self.report is None or self.report.phase == SERVING_PHASE


def id_hash(request_id: str) -> str:
    """Return what stands for a request's id in a report: the first 64 bits of its SHA-256, as hexadecimal digits."""
    return hashlib.sha256(request_id.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def read_report(body: Any) -> ReplicaReport:
    """Return the report of a decoded body of `/load`, without its answers.

    Raises:
        ReportError: a field is missing, has another type, or a value that cannot be.
    """
    fields = _Fields(body, "")
    requests, tokens, blocks = (fields.part(name) for name in ("requests", "tokens", "kv"))
    report = ReplicaReport(
        fields.text("boot_id"),
        fields.text("phase"),
        requests.count("queued"),
        requests.count("running"),
        tokens.count("queued"),
        tokens.count("running"),
        blocks.count("free_blocks"),
        blocks.count("total_blocks"),
        max(1, blocks.count("block_size_tokens")),
        fields.rate("prefill_tokens_per_second"),
        fields.rate("itl_seconds"),
    )
    if report.free_blocks > report.total_blocks:
        raise ReportError(f"kv.free_blocks is {report.free_blocks}, more than kv.total_blocks, {report.total_blocks}")
    return report


def read_answers(body: Any) -> list[Answer]:
    """Return the answers of a decoded body of `/load`.

    Raises:
        ReportError: as `read_report`, or there are more than the runtime keeps.
    """
    listed = body.get("answers", []) if isinstance(body, dict) else None
    if not isinstance(listed, list) or len(listed) > MOST_ANSWERS:
        raise ReportError(f"answers must be a list of at most {MOST_ANSWERS} objects")
    answers = []
    for number, entry in enumerate(listed):
        fields = _Fields(entry, f"answers[{number}]")
        prompt, cached = fields.count("prompt_tokens"), fields.count("cached_tokens")
        if cached > prompt:
            raise ReportError(f"answers[{number}].cached_tokens is {cached}, more than its prompt_tokens, {prompt}")
        answers.append(Answer(fields.text("id"), prompt, cached, fields.count("completion_tokens")))
    return answers


class _Fields:
    """The fields of one object of a report. None as an object has only zeros: no engine serves yet."""

    def __init__(self, value: Any, path: str) -> None:
        if not isinstance(value, dict) and not (value is None and path):
            raise ReportError(f"{path or 'the report'} must be an object, not {_shown(value)}")
        self._values, self._path = value, path

    def part(self, name: str) -> _Fields:
        return _Fields(self._get(name), self._name(name))

    def text(self, name: str) -> str:
        value = self._get(name)
        if not isinstance(value, str) or not 0 < len(value) <= 256:
            raise ReportError(f"{self._name(name)} must be a text of 1 to 256 characters, not {_shown(value)}")
        return value

    def count(self, name: str) -> int:
        if self._values is None:
            return 0
        value = self._get(name)
        if type(value) is not int or not 0 <= value <= MOST_COUNT:
            raise ReportError(f"{self._name(name)} must be an integer from 0 to {MOST_COUNT}, not {_shown(value)}")
        return value

    def rate(self, name: str) -> float | None:
        value = self._get(name)
        if value is None:
            return None
        if type(value) not in (int, float) or not math.isfinite(value) or not 0 < value <= MOST_RATE:
            raise ReportError(f"{self._name(name)} must be a number above 0, or null, not {_shown(value)}")
        return float(value)

    def _get(self, name: str) -> Any:
        if self._values is None or name not in self._values:
            raise ReportError(f"{self._name(name)} is missing")
        return self._values[name]

    def _name(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
