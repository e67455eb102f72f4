"""Measure an OpenAI endpoint or an engine under load, or compare two saved runs.

    millstream bench serve --url http://127.0.0.1:8000 --request-rate 4 --goodput ttft_ms:200,itl_ms:40
    millstream bench serve --url http://127.0.0.1:8000 --concurrency 16 --json a.json --plot a.svg
    millstream bench serve --url http://127.0.0.1:8000 --trace morning.jsonl
    millstream bench offline --model models/demo-chat --concurrency 16
    millstream bench --compare a.json b.json

In an open loop (--request-rate, --trace) requests are sent at fixed times, and latencies count from the time each was
due, so a stall of the server is fully measured. A closed loop (--concurrency) slows down with the server; it measures
throughput. Token counts come from the endpoint's `usage`. The API key, if any, is read from $OPENAI_API_KEY.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from millstream.arguments import CommandLineParser, words_of
from millstream.bench import compare, endpoint, plot, report
from millstream.bench.client import Endpoint, HttpClient
from millstream.bench.environment import this_machine
from millstream.bench.measure import Objective, measure
from millstream.bench.openai_api import RequestTemplate, Route
from millstream.bench.progress import LoadProgress
from millstream.bench.workload import (
    MAX_CONCURRENCY,
    PlannedRequest,
    Range,
    TokenIdPrompts,
    WorkloadSpec,
    plan,
    read_trace,
)
from millstream.saved_files import check_saved_files, write_saved_file
from millstream_runtime.config import RuntimeConfig
from millstream_runtime.config_flags import add_config_flags, from_namespace
from millstream_runtime.errors import InvalidConfigError

EXIT_NOTHING_MEASURED, EXIT_INTERRUPTED = 1, 130
MAX_TRACE_BYTES = 1 << 30
MAX_TOKEN_ID = (1 << 31) - 1
API_KEY_VARIABLE = "OPENAI_API_KEY"
SERVER_ONLY_FLAGS = (
    *("served_model_name", "host", "port"),
    *("heartbeat_interval_seconds", "drain_timeout_seconds", "log_level", "allowed_origins"),
)


def run(argv: Sequence[str]) -> int:
    """0; 1 when no request was answered; 130 after Ctrl-C (what was measured is printed and saved).

    Raises:
        RuntimeFailure: a flag, a file or the endpoint; one sentence.
    """
    given = command_parser().parse_args(list(argv))
    if given.compare is not None and given.mode is not None:
        raise InvalidConfigError("--compare reads two saved runs; use it without serve or offline.")
    if given.compare is not None:
        print(compare.table(*(compare.read(path) for path in given.compare)))
        return 0
    if given.mode is None:
        raise InvalidConfigError("Give a mode: `millstream bench serve`, `bench offline` or `bench --compare`.")
    return _measure(given)


def _measure(given: argparse.Namespace) -> int:
    """LoadResult a load, print it, save it."""
    check_saved_files({"--json": given.json, "--plot": given.plot}, filter(None, (given.trace,)))
    spec = _spec(given)
    requests = plan(spec) if given.trace is None else _trace(given.trace, given.num_requests)
    objective = Objective.parse(given.goodput) if given.goodput is not None else None
    environment = this_machine()
    ids = Range.parse("--token-ids", given.token_ids, 0, MAX_TOKEN_ID)
    measured_run, target = (_serve if given.mode == "serve" else _offline)(given, spec, requests, ids)
    document = report.document(
        mode=given.mode,
        target=target,
        spec=spec,
        requests=requests,
        records=measured_run.records,
        measured=(measured := measure(measured_run.records, objective)),
        objective=objective,
        environment={"hardware": _hardware(given, environment), "client": environment},
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        interrupted=measured_run.interrupted,
    )
    print(report.table(document), flush=True)
    _save(given, document)
    if measured_run.interrupted:
        return EXIT_INTERRUPTED
    return 0 if measured.completed else EXIT_NOTHING_MEASURED


def _serve(
    given: argparse.Namespace, spec: WorkloadSpec, requests: Sequence[PlannedRequest], ids: Range
) -> tuple[endpoint.LoadResult, dict[str, Any]]:
    client = HttpClient(Endpoint.parse(given.url), _api_key(), given.timeout_seconds)
    route = Route(given.route)
    prompt_ids = endpoint.default_ids(route, given.prompts, ids)

    async def load() -> tuple[endpoint.LoadResult, RequestTemplate]:
        try:
            model = await endpoint.find_model(client, given.model)
            template = RequestTemplate(model, route, given.temperature, given.ignore_eos)
            maker = await endpoint.prompt_maker(client, template, spec, prompt_ids)
            progress = LoadProgress(len(requests), sys.stderr)
            run = await endpoint.run_load(client, template, spec, requests, maker, given.max_connections, progress)
            return run, template
        finally:
            await client.close()

    done, template = asyncio.run(load())
    asked = {**_asked(given), "route": route.value, "prompts": "words" if prompt_ids is None else str(prompt_ids)}
    return done, {"model": template.model, "at": f"at {client.endpoint}", "url": str(client.endpoint), "asked": asked}


def _offline(
    given: argparse.Namespace, spec: WorkloadSpec, requests: Sequence[PlannedRequest], ids: Range
) -> tuple[endpoint.LoadResult, dict[str, Any]]:
    from millstream.bench.offline import run_offline
    from millstream.commands.serve import find_model_folder, require_model_folder, require_runtime_packages

    config = _engine_config(given, find_model_folder)
    require_model_folder(Path(config.model))
    require_runtime_packages()
    maker = TokenIdPrompts(ids, spec.seed, spec.shared_prefix_tokens)
    progress = LoadProgress(len(requests), sys.stderr)
    done = run_offline(
        config,
        spec,
        requests,
        maker,
        temperature=given.temperature,
        ignore_eos=given.ignore_eos,
        progress=progress,
    )
    settings = {name: value for name, value in config.as_dict().items() if name not in SERVER_ONLY_FLAGS}
    settings["model"] = config.served_model_name  # the folder's name, not its path
    asked = {**_asked(given), "route": Route.COMPLETIONS.value, "prompts": str(ids)}
    return done, {"model": config.served_model_name, "at": "in this process", "engine": settings, "asked": asked}


def _asked(given: argparse.Namespace) -> dict[str, Any]:
    return {"temperature": given.temperature, "ignore_eos": given.ignore_eos}


def _engine_config(given: argparse.Namespace, find_model_folder: Any) -> RuntimeConfig:
    for name in SERVER_ONLY_FLAGS:
        if getattr(given, name) is not None:
            raise InvalidConfigError(
                f"--{name.replace('_', '-')} has no effect in `bench offline`: there is no server."
            )
    if given.model is None:
        raise InvalidConfigError("Give --model: the folder of the model to measure.")
    given.model = str(find_model_folder(given.model))
    return from_namespace(given)


def _spec(given: argparse.Namespace) -> WorkloadSpec:
    if given.request_rate is not None and math.isnan(given.request_rate):
        raise InvalidConfigError("--request-rate is nan; it must be above 0, or inf for all at once.")
    if not 0 <= given.temperature <= 2:
        raise InvalidConfigError(f"--temperature is {given.temperature}; it must be 0 to 2.")
    if given.mode == "serve":
        if not 1 <= given.max_connections <= MAX_CONCURRENCY:
            raise InvalidConfigError(
                f"--max-connections is {given.max_connections}; it must be 1 to {MAX_CONCURRENCY}."
            )
        if not 0 < given.timeout_seconds < math.inf:
            raise InvalidConfigError(f"--timeout-seconds is {given.timeout_seconds}; it must be above 0.")
    if given.trace is not None and (given.input_tokens or given.output_tokens or given.shared_prefix_tokens):
        raise InvalidConfigError("A trace has its own lengths: leave out the flags for tokens and the shared prefix.")
    return WorkloadSpec(
        num_requests=given.num_requests,
        request_rate=given.request_rate,
        concurrency=given.concurrency,
        trace=given.trace.name if given.trace is not None else None,
        input_tokens=Range.parse("--input-tokens", given.input_tokens or "128", 1),
        output_tokens=Range.parse("--output-tokens", given.output_tokens or "128", 1),
        shared_prefix_tokens=given.shared_prefix_tokens,
        seed=given.seed,
    )


def _trace(path: Path, num_requests: int | None) -> list[PlannedRequest]:
    try:
        if path.stat().st_size > MAX_TRACE_BYTES:
            raise InvalidConfigError(f"The trace {path} is larger than {MAX_TRACE_BYTES} bytes.")
        with path.open(encoding="utf-8-sig") as lines:  # some editors begin a file with a mark
            return read_trace(lines, str(path), num_requests)
    except OSError as error:
        raise InvalidConfigError(f"Cannot read the trace {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise InvalidConfigError(f"The trace {path} is not UTF-8.") from None


def _api_key() -> str | None:
    key = os.environ.get(API_KEY_VARIABLE) or None
    if key is not None and not (key.isascii() and key.isprintable()):
        raise InvalidConfigError(f"${API_KEY_VARIABLE} holds characters that no HTTP header can carry.")
    return key


def _hardware(given: argparse.Namespace, environment: dict[str, Any]) -> str:
    """The hardware of the measured side: from --hardware, or this machine if it is local; never guessed."""
    if given.hardware is not None:
        return str(given.hardware)
    if given.mode == "serve" and not Endpoint.parse(given.url).is_loopback:
        return "unknown (--hardware)"
    gpus = ", ".join(environment["gpus"])
    return f"{environment['cpu']}, {environment['cores']} cores" + (f", {gpus}" if gpus else "")


def _save(given: argparse.Namespace, document: dict[str, Any]) -> None:
    for path, text in ((given.json, report.to_json), (given.plot, plot.svg)):
        if path is not None:
            write_saved_file(path, text(document))
            print(f"saved {path}", file=sys.stderr)


def command_parser() -> CommandLineParser:
    """Return the flags of the command."""
    parser = CommandLineParser(
        prog="millstream bench",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("A.json", "B.json"), help="compare two saved runs")
    modes = parser.add_subparsers(dest="mode", metavar="serve|offline")
    serve = modes.add_parser("serve", allow_abbrev=False, help="load an OpenAI endpoint")
    flag = serve.add_argument
    flag("--url", required=True, metavar="URL", help="the endpoint, such as http://127.0.0.1:8000")
    flag("--model", metavar="NAME", help="model name at the endpoint (default: the one it serves)")
    flag(
        "--route",
        choices=words_of(Route),
        default=Route.COMPLETIONS.value,
        help="the API to call (default: completions)",
    )
    flag("--prompts", choices=["ids", "words"], help="exact token ids, or words (default: ids; words for chat)")
    flag("--max-connections", type=int, default=512, metavar="N", help="limit in an open loop (default: 512)")
    flag(
        "--timeout-seconds",
        type=float,
        default=600.0,
        metavar="S",
        help="timeout of one complete answer (default: 600)",
    )
    _workload_flags(serve)
    offline = modes.add_parser("offline", allow_abbrev=False, help="load an engine in this process")
    add_config_flags(offline)
    _workload_flags(offline)
    return parser


def _workload_flags(parser: argparse.ArgumentParser) -> None:
    flag = parser.add_argument_group("load").add_argument
    flag("--request-rate", type=float, metavar="R", help="open loop: mean requests per second, or inf")
    flag("--concurrency", type=int, metavar="N", help="closed loop: number of clients, each with one request at a time")
    flag("--trace", type=Path, metavar="FILE", help="JSONL: timestamp_seconds, input_tokens or prompt, output_tokens")
    flag("--num-requests", type=int, metavar="N", help="number of requests (default: 100, or the whole trace)")
    flag("--input-tokens", metavar="N|LOW:HIGH", help="length of each prompt (default: 128)")
    flag("--output-tokens", metavar="N|LOW:HIGH", help="length of each answer (default: 128)")
    flag(
        "--shared-prefix-tokens",
        type=int,
        default=0,
        metavar="N",
        help="length of a prefix that all prompts share (default: 0)",
    )
    flag(
        "--token-ids",
        default="300:1999",
        metavar="LOW:HIGH",
        help="range of the token ids of prompts (default: 300:1999)",
    )
    flag("--temperature", type=float, default=0.0, metavar="T", help="sampling temperature (default: 0, greedy)")
    flag(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="generate to the full length; an extension that OpenAI's own API rejects (default: on)",
    )
    flag("--seed", type=int, default=0, metavar="N", help="seed of arrivals, lengths and prompts (default: 0)")
    output = parser.add_argument_group("output").add_argument
    output("--goodput", metavar="NAME:MS,…", help="count requests within ttft_ms, itl_ms, tpot_ms, e2e_ms")
    output("--json", type=Path, metavar="FILE", help="save the results, with each request")
    output("--plot", type=Path, metavar="FILE.svg", help="save a plot")
    output("--hardware", metavar="TEXT", help="hardware of a remote endpoint, for the report")
