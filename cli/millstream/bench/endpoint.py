"""A load against an OpenAI endpoint: find its model, warm it up with one request, then run.

A problem that would fail every request (no server, a wrong key, an unknown model, token ids that the endpoint rejects)
is found before the run and reported in one sentence.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from millstream.bench.client import HttpClient, RequestFailed
from millstream.bench.load_generator import LoadGenerator
from millstream.bench.measure import RequestRecord
from millstream.bench.openai_api import Clock, RequestTemplate, Route, send_request
from millstream.bench.progress import LoadProgress
from millstream.bench.workload import (
    PlannedRequest,
    PromptMaker,
    Range,
    TokenIdPrompts,
    WordPrompts,
    WorkloadSpec,
    words,
)
from millstream_runtime.errors import FailureReason, InvalidConfigError, RuntimeFailure

CALIBRATION_WORDS = (32, 160)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The records of a load. `interrupted`: by Ctrl-C."""

    records: list[RequestRecord]
    interrupted: bool


def stopwatch() -> Clock:
    """A clock of seconds since now."""
    start = time.perf_counter()
    return lambda: time.perf_counter() - start


async def find_model(client: HttpClient, name: str | None) -> str:
    """The model to request: `name` if the endpoint serves it, else the only one it serves.

    Raises:
        RuntimeFailure: nothing answers, the key is refused, there is no such model, or there are several.
    """
    try:
        listing = await client.get_json("/v1/models")
        served = [str(card["id"]) for card in listing["data"]]
    except (KeyError, TypeError):
        served = []
    except RequestFailed as failure:
        if failure.status in (401, 403):
            raise _failure(f"{failure} Set $OPENAI_API_KEY to a key that {client.endpoint} accepts.") from None
        if failure.status is None or name is None:
            raise _failure(str(failure)) from None
        return name  # an endpoint without a list of models; the first request checks it
    if name is None and len(served) != 1:
        choice = f"it serves {', '.join(served[:20])}" if served else "it lists none"
        raise InvalidConfigError(f"Give --model: {client.endpoint} does not serve exactly one, {choice}.")
    if name is not None and served and name not in served:
        raise _failure(f"{client.endpoint} does not serve {name!r}; it serves {', '.join(served[:20])}.")
    return name if name is not None else served[0]


async def prompt_maker(
    client: HttpClient, template: RequestTemplate, spec: WorkloadSpec, ids: Range | None
) -> PromptMaker:
    """Build prompts that this endpoint accepts; `ids` None: words. Sends the first, unmeasured request.

    Raises:
        RuntimeFailure: the endpoint refuses; the message says why.
    """
    if ids is not None:
        maker = TokenIdPrompts(ids, spec.seed, spec.shared_prefix_tokens)
        await _count_tokens(client, template, [ids.high, *maker.make(0, 15)])
        return maker
    few, many = CALIBRATION_WORDS
    counted = [await _count_tokens(client, template, " ".join(words("calibration", count))) for count in (few, many)]
    return WordPrompts.calibrated((few, counted[0]), (many, counted[1]), spec.seed, spec.shared_prefix_tokens)


async def _count_tokens(client: HttpClient, template: RequestTemplate, prompt: list[int] | str) -> int:
    record = RequestRecord(-1, 0.0, 0.0)
    await send_request(client, template.route, template.body(prompt, 1), record, stopwatch())
    if record.error is None:
        return record.prompt_tokens
    hint = ""
    if isinstance(prompt, list) and "answered 4" in record.error:
        hint = " If it is about token ids, give --token-ids LOW:HIGH inside its vocabulary, or --prompts words."
    elif template.ignore_eos and "ignore_eos" in record.error:
        hint = " Give --no-ignore-eos for endpoints without that extension."
    raise _failure(record.error + hint)


async def run_load(
    client: HttpClient,
    template: RequestTemplate,
    spec: WorkloadSpec,
    requests: Sequence[PlannedRequest],
    maker: PromptMaker,
    max_connections: int,
    progress: LoadProgress,
) -> LoadResult:
    """LoadResult the plan."""
    clock = stopwatch()

    def prepare(request: PlannedRequest) -> dict[str, Any]:
        prompt = request.prompt if request.prompt is not None else maker.make(request.index, request.input_tokens or 1)
        return template.body(prompt, request.output_tokens)

    async def send(body: dict[str, Any], record: RequestRecord) -> None:
        progress.began()
        await send_request(client, template.route, body, record, clock)
        progress.ended(record)

    load = LoadGenerator(requests, prepare, send, clock)
    ticker = asyncio.create_task(_tick(progress.draw))
    try:
        await load.run(spec.concurrency, max_connections)
    finally:
        ticker.cancel()
        progress.close()
    return LoadResult(load.records, load.interrupted)


async def _tick(draw: Callable[[], None]) -> None:
    while True:
        draw()
        await asyncio.sleep(0.2)


def default_ids(route: Route, prompts: str | None, token_ids: Range) -> Range | None:
    """The range of token ids where the route accepts ids, unless words are requested. None: words.

    Raises:
        InvalidConfigError: ids for a chat, which is made of text.
    """
    if prompts == "ids" and route is Route.CHAT:
        raise InvalidConfigError("--prompts ids needs --route completions: a chat is made of text.")
    return None if prompts == "words" or route is Route.CHAT else token_ids


def _failure(message: str) -> RuntimeFailure:
    return RuntimeFailure(FailureReason.BENCHMARK_FAILED, message)
