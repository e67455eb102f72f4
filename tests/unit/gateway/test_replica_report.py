"""A replica's report is another process's word: read strictly, and refused with the field's name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from millstream_gateway.replica_report import ReportError, read_answers, read_report
from millstream_gateway.state_file import StateError, read_state

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "replicas.json"
LOAD: dict[str, Any] = {
    "boot_id": "3f",
    "phase": "Ready",
    "requests": {"queued": 1, "running": 2},
    "tokens": {"queued": 30, "running": 400},
    "kv": {"free_blocks": 5, "total_blocks": 60, "block_size_tokens": 16},
    "prefill_tokens_per_second": 8100.5,
    "itl_seconds": None,
    "answers": [{"id": "9b", "prompt_tokens": 9, "cached_tokens": 6, "completion_tokens": 8, "ttft_seconds": 0.1}],
    "a field of a newer runtime": 1,
}


def test_a_report_is_read() -> None:
    report = read_report(LOAD)
    assert (report.queued_tokens, report.running_requests, report.capacity_tokens) == (30, 2, 960)
    assert (report.prefill_tokens_per_second, report.itl_seconds) == (8100.5, None)
    assert [(one.id, one.cached_tokens) for one in read_answers(LOAD)] == [("9b", 6)]


def test_a_replica_without_an_engine_reports_nulls() -> None:
    report = read_report({**LOAD, "requests": None, "tokens": None, "kv": None, "prefill_tokens_per_second": None})
    assert (report.queued_tokens, report.capacity_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("boot_id",), 7, "boot_id must be a text"),
        (("tokens", "queued"), -1, "tokens.queued must be an integer from 0"),
        (("tokens", "queued"), True, "tokens.queued must be an integer from 0"),
        (("tokens", "queued"), 10**30, "tokens.queued must be an integer from 0"),
        (("kv",), [], "kv must be an object"),
        (("kv", "free_blocks"), 61, "kv.free_blocks is 61, more than kv.total_blocks, 60"),
        (("prefill_tokens_per_second",), 0, "prefill_tokens_per_second must be a number above 0"),
        (("prefill_tokens_per_second",), float("nan"), "prefill_tokens_per_second must be a number above 0"),
        (("answers",), [{}] * 257, "answers must be a list of at most 256"),
        (("answers", 0, "cached_tokens"), 10, "cached_tokens is 10, more than its prompt_tokens, 9"),
    ],
)
def test_a_report_that_cannot_be_is_refused_by_the_name_of_its_field(
    path: tuple[Any, ...], value: Any, message: str
) -> None:
    body = copy.deepcopy(LOAD)
    place = body
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    with pytest.raises(ReportError, match=message):
        (read_answers if path[0] == "answers" else read_report)(body)


def test_a_missing_field_is_named() -> None:
    body = {name: value for name, value in LOAD.items() if name != "phase"}
    with pytest.raises(ReportError, match="phase is missing"):
        read_report(body)


def test_a_state_file_makes_beliefs() -> None:
    state = read_state(EXAMPLE.read_bytes(), "demo-chat")
    assert [replica.is_serving for replica in state.replicas] == [True, True, True, False]
    assert state.replicas[0].reported_at_seconds == -0.04


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"endpoint": "10.0.0.11"}, "endpoint must be an address and a port"),
        ({"endpoint": "10.0.0.12:8000"}, "two replicas have the endpoint 10.0.0.12:8000"),
        ({"age": 1}, "age is not a field; the fields are endpoint, age_seconds, load, holds"),
        ({"age_seconds": -1}, "age_seconds must be a number from 0"),
        ({"holds": "text"}, "holds must be a list of texts"),
        ({"load": {}}, r"replicas\[0\].load: requests is missing"),
    ],
)
def test_a_state_file_that_cannot_be_is_refused_by_the_name_of_its_field(change: dict[str, Any], message: str) -> None:
    document = json.loads(EXAMPLE.read_text())
    document["replicas"][0] |= change
    with pytest.raises(StateError, match=message):
        read_state(json.dumps(document).encode(), "demo-chat")


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b'{"replicas": 1}', b'{"replicas": [1]}', b'{"replicas": [NaN]}'])
def test_what_is_no_state_is_refused(text: bytes) -> None:
    with pytest.raises(StateError):
        read_state(text, "demo-chat")
