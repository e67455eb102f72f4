"""One load on one server, through the client of `millstream bench serve`."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from benchmarks.servers.models import Model
from benchmarks.servers.peers import Server
from millstream.bench.client import Endpoint, HttpClient, RequestFailed
from millstream.bench.endpoint import stopwatch
from millstream.bench.load_generator import LoadGenerator
from millstream.bench.measure import RequestRecord, measure
from millstream.bench.openai_api import Clock, RequestTemplate, Route, StreamedAnswer
from millstream.bench.workload import PlannedRequest, Range, TokenIdPrompts, WorkloadSpec, plan

REQUESTS_PER_CLIENT = 1.5
LEAST_REQUESTS = 4
WARM_UP_SHARE = 4  # answers of a warm-up are shorter by this
PROBE_PROMPTS, PROBE_INPUT_TOKENS, PROBE_OUTPUT_TOKENS = 4, 32, 24


@dataclass(frozen=True)
class Case:
    """So many clients, each of which sends its next request when it has its answer."""

    clients: int
    lengths: str  # "equal" or "mixed"
    ours_alone: bool = False  # no peer is measured: the goal compares our own cases

    @property
    def name(self) -> str:
        return f"{self.clients}-{self.lengths}"


@dataclass(frozen=True)
class Target:
    """A server that runs, at `url`."""

    server: Server
    url: str

    def client(self, timeout_seconds: float = 600.0) -> HttpClient:
        return HttpClient(Endpoint.parse(self.url), timeout_seconds=timeout_seconds)

    def body(self, prompt: list[int], output_tokens: int) -> dict[str, Any]:
        return self.server.adapt(RequestTemplate(self.server.model).body(prompt, output_tokens))


def planned(case: Case, model: Model, *, warm_up: bool = False) -> list[PlannedRequest]:
    """The requests of one round. Lengths are the same in every round; a warm-up has one short request per client."""
    lengths = model.lengths[case.lengths]
    output = Range.parse("output_tokens", lengths.output_tokens, 1)
    if warm_up:
        output = Range(max(1, output.low // WARM_UP_SHARE), max(1, output.high // WARM_UP_SHARE))
    count = case.clients if warm_up else max(LEAST_REQUESTS, round(REQUESTS_PER_CLIENT * case.clients))
    spec = WorkloadSpec(
        num_requests=count,
        concurrency=case.clients,
        input_tokens=Range.parse("input_tokens", lengths.input_tokens, 1),
        output_tokens=output,
        seed=0,
    )
    return plan(spec)


def run_case(target: Target, case: Case, model: Model, seed: int, *, warm_up: bool = False) -> dict[str, Any]:
    """Figures of one round: tokens per second, and latencies in milliseconds."""
    return asyncio.run(_run(target, planned(case, model, warm_up=warm_up), case.clients, model, seed))


async def _run(target: Target, requests: list[PlannedRequest], clients: int, model: Model, seed: int) -> dict[str, Any]:
    maker = TokenIdPrompts(Range(model.first_id, int(model.config["vocab_size"]) - 1), seed)
    client, clock = target.client(), stopwatch()

    def prepare(request: PlannedRequest) -> dict[str, Any]:
        return target.body(maker.make(request.index, request.input_tokens or 1), request.output_tokens)

    async def send(body: dict[str, Any], record: RequestRecord) -> None:
        await send_and_time(client, target.server, body, record, clock)

    load = LoadGenerator(requests, prepare, send, clock)
    try:
        await load.run(clients, clients)
    finally:
        await client.close()
    return summarise(load.records, requests)


async def send_and_time(
    client: HttpClient, server: Server, body: dict[str, Any], record: RequestRecord, clock: Clock
) -> str:
    """Send `body`, fill `record` and return the text. A failure is a sentence in `record.error`."""
    answer, text = StreamedAnswer(record), []
    try:
        async with aclosing(client.post_sse(Route.COMPLETIONS.path, body)) as events:  # type: ignore[type-var]
            async for data in events:
                answer.take(data, clock())
                text.append(data)
        if not server.sends_done:
            answer.take("[DONE]", clock())
        answer.finish()
    except RequestFailed as failure:
        record.error = str(failure)
    record.end_seconds = clock()
    return "".join(map(_text, text))


def summarise(records: list[RequestRecord], requests: list[PlannedRequest]) -> dict[str, Any]:
    """One round in figures. A server that answers with fewer tokens than it was asked for has failed."""
    for record in records:
        asked = requests[record.index].output_tokens
        if record.error is None and record.completion_tokens != asked:
            record.error = f"{record.completion_tokens} tokens instead of {asked}"
    measured = measure(records)
    return {
        "requests": len(records),
        "failed": measured.failed,
        "errors": dict(Counter(record.error for record in records if record.error is not None).most_common(3)),
        "prompt_tokens": measured.prompt_tokens,
        "completion_tokens": measured.completion_tokens,
        "seconds": round(measured.duration_seconds, 3),
        "tokens_per_second": round(measured.output_tokens_per_second, 2),
        "ttft_p50_ms": round(measured.ttft.percentiles[50] * 1e3, 2),
        "ttft_p95_ms": round(measured.ttft.percentiles[95] * 1e3, 2),
        "itl_p99_ms": round(measured.itl.percentiles[99] * 1e3, 2),
    }


def answers_one_token(target: Target, model: Model) -> bool:
    """Whether the server is ready: a health route may answer earlier."""
    return ask(target, [model.first_id] * 4, 1, timeout_seconds=60.0)[1] is None


def greedy_answers(target: Target, model: Model) -> list[str]:
    """Texts of some greedy answers, one request after another, to be compared with another server's.

    The prompts are the token ids that their text has: a server that takes only text computes the same.
    """
    tokenizer = Tokenizer.from_file(str(model.folder / "tokenizer.json"))
    maker = TokenIdPrompts(Range(model.first_id, int(model.config["vocab_size"]) - 1), seed=-1)
    texts = [tokenizer.decode(maker.make(index, PROBE_INPUT_TOKENS)) for index in range(PROBE_PROMPTS)]
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    answers = [ask(target, prompt, PROBE_OUTPUT_TOKENS) for prompt in prompts]
    return [text if error is None else f"failed: {error}" for text, error in answers]


def ask(
    target: Target, prompt: list[int], output_tokens: int, timeout_seconds: float = 600.0
) -> tuple[str, str | None]:
    """One request: the text, and what went wrong."""

    async def once() -> tuple[str, str | None]:
        client, record = target.client(timeout_seconds), RequestRecord(0, 0.0, 0.0)
        try:
            body = target.body(prompt, output_tokens)
            text = await send_and_time(client, target.server, body, record, stopwatch())
            return text, record.error
        finally:
            await client.close()

    return asyncio.run(once())


def _text(data: str) -> str:
    if data == "[DONE]":
        return ""
    choices = json.loads(data).get("choices") or []
    return "".join(str(choice.get("text") or "") for choice in choices)
