"""The workload: requests, their lengths and arrival times, all decided before the run. Pure.

Three shapes of load:

    open loop     requests arrive independently of the server: Poisson arrivals at `request_rate`
    closed loop   `concurrency` clients, each of which sends its next request when it has its answer
    trace         arrivals and lengths from a JSONL file, as recorded somewhere

**Coordinated omission.** A closed loop slows down together with the server: while the server stalls, no request is
sent, so the requests that would have waited are never counted, and the percentiles look better than users would find
them (Gil Tene, "How NOT to Measure Latency"). So in the open loop and in a trace all arrival times are fixed in
advance, and every latency counts from the time a request was *due*. If the client sends it late, because the server or
the client itself is behind, that wait is part of the request's latency, as it is for a user. Use the open loop for
latency under a given demand, and the closed loop to find the throughput of N clients.

Everything is drawn from `random.Random` with a text seed, which gives the same numbers on every machine. Arrivals,
lengths and words each have their own stream: another rate does not change the prompts.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from millstream_runtime.errors import InvalidConfigError

MAX_REQUESTS = 1_000_000
MAX_TOKENS = 1 << 20
MAX_CONCURRENCY = 4096
MAX_TIMESTAMP_SECONDS = 1e12
WORDS = (  # noqa: SIM905 - three lines read better than fifty-five strings
    "the and that with from this have they which their would about there could other these first after water where "
    "through before little right three great still between under should house while country school never world "
    "learn plant cover answer start point city tree cross hard light letter river carry state book hear stop second"
).split()


@dataclass(frozen=True, slots=True)
class Range:
    """An inclusive range of whole numbers; `128` is 128:128."""

    low: int
    high: int

    @staticmethod
    def parse(flag: str, text: str, least: int, most: int = MAX_TOKENS) -> Range:
        """`N` or `LOW:HIGH`.

        Raises:
            InvalidConfigError: not that form, or out of range.
        """
        low, _, high = text.partition(":")
        try:
            parsed = Range(int(low), int(high or low))
        except ValueError:
            raise InvalidConfigError(f"{flag} is {text!r}; it must be a number such as 128, or 64:256.") from None
        if not least <= parsed.low <= parsed.high <= most:
            raise InvalidConfigError(f"{flag} is {text!r}; it must be {least} to {most}, the lower end first.")
        return parsed

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to come.

    `arrival_seconds` counts from the start of the run; None in a closed loop, where the previous answer decides.
    `prompt` is given by a trace alone; else `input_tokens` says how long it has to become.
    """

    index: int
    arrival_seconds: float | None
    input_tokens: int | None
    output_tokens: int
    prompt: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """A load, described. Exactly one of `request_rate`, `concurrency` and `trace` is given.

    Raises:
        InvalidConfigError: a value that cannot work; the message names the flag.
    """

    num_requests: int | None = None  # None: 100, or the whole trace
    request_rate: float | None = None  # requests a second; infinite: all at once
    concurrency: int | None = None
    trace: str | None = None  # the file's name, for the report
    input_tokens: Range = Range(128, 128)
    output_tokens: Range = Range(128, 128)
    shared_prefix_tokens: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_requests is not None:
            _require(
                1 <= self.num_requests <= MAX_REQUESTS, "--num-requests", self.num_requests, f"1 to {MAX_REQUESTS}"
            )
        shapes = [self.request_rate is not None, self.concurrency is not None, self.trace is not None]
        if sum(shapes) != 1:
            raise InvalidConfigError("Give one of --request-rate (open loop), --concurrency (closed loop) and --trace.")
        if self.request_rate is not None:
            _require(self.request_rate > 0, "--request-rate", self.request_rate, "above 0, or inf for all at once")
        if self.concurrency is not None:
            allowed = f"1 to {MAX_CONCURRENCY}"
            _require(1 <= self.concurrency <= MAX_CONCURRENCY, "--concurrency", self.concurrency, allowed)
        allowed = f"0 to {self.input_tokens.low - 1}, less than the shortest prompt"
        holds = 0 <= self.shared_prefix_tokens < self.input_tokens.low
        _require(holds, "--shared-prefix-tokens", self.shared_prefix_tokens, allowed)

    def describe(self) -> str:
        """`open loop, 4 requests/s (Poisson, seed 0)`."""
        if self.concurrency is not None:
            return f"closed loop, {self.concurrency} concurrent"
        if self.trace is not None:
            return f"trace {self.trace}"
        if self.request_rate == math.inf:
            return "open loop, all requests at once"
        return f"open loop, {self.request_rate:g} requests/s (Poisson, seed {self.seed})"

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; an infinite rate is the text `inf`, since JSON has no infinity."""
        return {
            "num_requests": self.num_requests,
            "request_rate": "inf" if self.request_rate == math.inf else self.request_rate,
            "concurrency": self.concurrency,
            "trace": self.trace,
            "input_tokens": str(self.input_tokens) if self.trace is None else None,
            "output_tokens": str(self.output_tokens) if self.trace is None else None,
            "shared_prefix_tokens": self.shared_prefix_tokens,
            "seed": self.seed,
        }


def plan(spec: WorkloadSpec) -> list[PlannedRequest]:
    """The requests of an open or a closed loop, in the order in which they come. The first is due at 0."""
    count = spec.num_requests if spec.num_requests is not None else 100
    lengths = random.Random(f"{spec.seed}/lengths")  # noqa: S311 - a load, not a secret
    arrivals: Sequence[float | None] = (
        [None] * count if spec.request_rate is None else poisson_arrivals(spec.request_rate, count, spec.seed)
    )
    return [
        PlannedRequest(
            index,
            arrivals[index],
            lengths.randint(spec.input_tokens.low, spec.input_tokens.high),
            lengths.randint(spec.output_tokens.low, spec.output_tokens.high),
        )
        for index in range(count)
    ]


def poisson_arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Seconds since the start, ascending, from 0: gaps are exponential with mean 1/`rate`.

    An infinite rate is legal: all requests arrive at 0.
    """
    rng = random.Random(f"{seed}/arrivals")  # noqa: S311
    times = [0.0]
    for _ in range(count - 1):
        times.append(times[-1] + (rng.expovariate(rate) if rate != math.inf else 0.0))
    return times


def read_trace(lines: Iterable[str], name: str, num_requests: int | None = None) -> list[PlannedRequest]:
    """A trace: one JSON object a line, `{"timestamp_seconds", "input_tokens" or "prompt", "output_tokens"}`.

    Lines need not be in order; the earliest becomes second 0. `num_requests` keeps the earliest ones.

    Raises:
        InvalidConfigError: a line that is not that; the message has its number.
    """
    rows = [_trace_row(line, f"{name} line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise InvalidConfigError(f"The trace {name} is empty; it needs one JSON object a line.")
    if len(rows) > MAX_REQUESTS:
        raise InvalidConfigError(f"The trace {name} has {len(rows)} requests; at most {MAX_REQUESTS} can be run.")
    rows.sort(key=lambda row: row.arrival_seconds or 0.0)
    start = rows[0].arrival_seconds or 0.0
    kept = rows[:num_requests] if num_requests is not None else rows
    return [
        replace(row, index=index, arrival_seconds=(row.arrival_seconds or 0.0) - start)
        for index, row in enumerate(kept)
    ]


def _trace_row(line: str, where: str) -> PlannedRequest:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise InvalidConfigError(f"{where} is not JSON.") from None
    if not isinstance(row, dict):
        raise InvalidConfigError(f"{where} is not a JSON object.")
    at = row.get("timestamp_seconds")
    if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at <= MAX_TIMESTAMP_SECONDS:
        shown = f"{at!r}"[:40]
        raise InvalidConfigError(
            f"{where}: timestamp_seconds is {shown}; it must be a number from 0 to {MAX_TIMESTAMP_SECONDS:g}."
        )
    output_tokens = _trace_tokens(row, "output_tokens", where)
    prompt = row.get("prompt")
    if prompt is None:
        return PlannedRequest(0, float(at), _trace_tokens(row, "input_tokens", where), output_tokens)
    if not isinstance(prompt, str) or not prompt:
        raise InvalidConfigError(f"{where}: prompt must be a text that is not empty.")
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        raise InvalidConfigError(f"{where}: prompt has half of a surrogate pair, such as \\ud83d alone.")
    return PlannedRequest(0, float(at), None, output_tokens, prompt)


def _trace_tokens(row: dict[str, Any], field: str, where: str) -> int:
    value = row.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_TOKENS:
        alternative = " (or give a prompt)" if field == "input_tokens" else ""
        raise InvalidConfigError(
            f"{where}: {field} is {value!r}; it must be a whole number, 1 to {MAX_TOKENS}{alternative}."
        )
    return value


def fingerprint(requests: Sequence[PlannedRequest]) -> str:
    """Sixteen hex digits over all requests and their times: two runs with the same one had the same load."""
    digest = hashlib.sha256()
    for request in requests:
        prompt = hashlib.sha256(request.prompt.encode()).hexdigest() if request.prompt is not None else None
        row = [request.arrival_seconds, request.input_tokens, request.output_tokens, prompt]
        digest.update(json.dumps(row).encode() + b"\n")
    return digest.hexdigest()[:16]


class PromptMaker(Protocol):
    """Makes a prompt of about `num_tokens` tokens for request `index`; the same one every time."""

    def make(self, index: int, num_tokens: int) -> list[int] | str: ...


@dataclass(frozen=True, slots=True)
class TokenIdPrompts:
    """Exact lengths: token ids drawn from `ids`. For endpoints that take ids (`/v1/completions` of most servers)."""

    ids: Range
    seed: int
    shared_prefix_tokens: int = 0

    def make(self, index: int, num_tokens: int) -> list[int]:
        shared = min(self.shared_prefix_tokens, num_tokens)
        return [*self._draw("prefix", shared), *self._draw(str(index), num_tokens - shared)]

    def _draw(self, stream: str, count: int) -> list[int]:
        rng = random.Random(f"{self.seed}/prompt/{stream}")  # noqa: S311
        return rng.choices(range(self.ids.low, self.ids.high + 1), k=count)


@dataclass(frozen=True, slots=True)
class WordPrompts:
    """Lengths within a few per cent: English words, as many as the measured `tokens_per_word` asks for.

    `overhead_tokens` is what the endpoint adds to every prompt (a chat template, a BOS).
    """

    tokens_per_word: float
    overhead_tokens: float
    seed: int
    shared_prefix_tokens: int = 0

    @staticmethod
    def calibrated(few: tuple[int, int], many: tuple[int, int], seed: int, shared_prefix_tokens: int) -> WordPrompts:
        """From two prompts of known length: (words, tokens that the endpoint counted) of each."""
        slope = max((many[1] - few[1]) / (many[0] - few[0]), 0.1)
        return WordPrompts(slope, max(few[1] - slope * few[0], 0.0), seed, shared_prefix_tokens)

    def make(self, index: int, num_tokens: int) -> str:
        wanted = max(1, round((num_tokens - self.overhead_tokens) / self.tokens_per_word))
        shared = min(round(self.shared_prefix_tokens / self.tokens_per_word), wanted - 1)
        return " ".join(
            [*words(f"{self.seed}/prompt/prefix", shared), *words(f"{self.seed}/prompt/{index}", wanted - shared)]
        )


def words(seed: str, count: int) -> list[str]:
    """`count` common English words."""
    rng = random.Random(seed)  # noqa: S311
    return [rng.choice(WORDS) for _ in range(count)]


def _require(holds: bool, flag: str, value: object, allowed: str) -> None:
    if not holds:
        raise InvalidConfigError(f"{flag} is {value}; it must be {allowed}.")
