"""What the events of a stream mean, and the errors when an endpoint cannot be measured."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millstream.bench.client import RequestFailed
from millstream.bench.endpoint import find_model
from millstream.bench.measure import RequestRecord
from millstream.bench.openai_api import RequestTemplate, Route, StreamedAnswer
from millstream_runtime.errors import RuntimeFailure
from tests.unit.bench.test_client import OK, scripted

USAGE = json.dumps({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7}})
END = json.dumps({"choices": [{"text": "", "finish_reason": "length"}], "usage": None})


def text(content: str) -> str:
    return json.dumps({"choices": [{"text": content, "finish_reason": None}]})


def chat(**delta: Any) -> str:
    return json.dumps({"choices": [{"delta": delta, "finish_reason": None}]})


def read(*events: str) -> RequestRecord:
    """Event i arrives at second i."""
    record = RequestRecord(0, 0.0, 0.0)
    answer = StreamedAnswer(record)
    for second, data in enumerate(events):
        answer.take(data, float(second))
    answer.finish()
    return record


def test_counts_are_usage_and_times_are_of_chunks_with_text() -> None:
    record = read(text("a"), text(""), text("bcd"), END, USAGE, "[DONE]")
    assert record.chunk_seconds == [0.0, 2.0]
    assert (record.prompt_tokens, record.completion_tokens) == (5, 7)  # two chunks, seven tokens


def test_a_chats_opening_is_no_text_but_thoughts_are() -> None:
    opening = chat(role="assistant", content="")
    assert read(opening, chat(reasoning_content="hm"), chat(content="a"), END, USAGE, "[DONE]").chunk_seconds == [1, 2]


def test_an_answer_that_spells_nothing_is_first_seen_at_its_end() -> None:
    assert read(END, USAGE, "[DONE]").chunk_seconds == [0.0]


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([text("a"), END, "[DONE]"], "The stream had no usage"),
        ([text("a"), END, USAGE], "The stream ended without [DONE]."),
        ([text("a"), '{"error": {"message": "the engine\\nstopped"}}'], "ended in an error: the engine stopped"),
        (["{"], "not a JSON object"),
        ([USAGE, "[DONE]"], "neither text nor an end"),
    ],
)
def test_a_stream_that_is_not_whole_fails_with_a_sentence(events: list[str], said: str) -> None:
    with pytest.raises(RequestFailed) as caught:
        read(*events)
    assert said in str(caught.value)


def test_what_is_asked_follows_the_route_and_leaves_extensions_out_on_demand() -> None:
    assert RequestTemplate("m").body([1, 2], 3)["prompt"] == [1, 2]
    assert RequestTemplate("m").body([1, 2], 3)["ignore_eos"] is True
    body = RequestTemplate("m", Route.CHAT, ignore_eos=False).body("hi", 3)
    assert body["messages"] == [{"role": "user", "content": "hi"}]
    assert "ignore_eos" not in body
    assert body["stream_options"] == {"include_usage": True}


def models(*names: str) -> bytes:
    body = json.dumps({"data": [{"id": name} for name in names]}).encode()
    return OK + b"Content-Length: %d\r\n\r\n" % len(body) + body


EMPTY_401 = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n"
EMPTY_404 = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "name", "said"),
    [
        (EMPTY_401, None, "Set $OPENAI_API_KEY to a key that"),
        (EMPTY_404, None, "The endpoint answered 404."),
        (models("a", "b"), None, "Give --model: "),
        (models(), None, "it lists none"),
        (models("a"), "b", "does not serve 'b'; it serves a"),
        (OK + b"Content-Length: 4\r\n\r\nnull", None, "it lists none"),
    ],
)
async def test_an_endpoint_that_cannot_be_measured_is_one_sentence(answer: bytes, name: str | None, said: str) -> None:
    async with scripted(answer) as (client, _):
        with pytest.raises(RuntimeFailure) as caught:
            await find_model(client, name)
    assert said in caught.value.message
    assert "\n" not in caught.value.message


async def test_the_only_model_is_taken_and_a_named_one_needs_no_list() -> None:
    async with scripted(models("only")) as (client, _):
        assert await find_model(client, None) == "only"
    async with scripted(EMPTY_404) as (client, _):
        assert await find_model(client, "given") == "given"
