"""The Python client of OpenAI, synchronous and asynchronous."""

from __future__ import annotations

import asyncio

import openai
import pytest

from tests.support.server_thread import ServerThread

MESSAGES = [{"role": "user", "content": "What is a Kubernetes pod?"}]
CHAT = {"model": "demo-chat", "messages": MESSAGES, "max_tokens": 200, "temperature": 0}


@pytest.fixture
def client(demo_server: ServerThread) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key="unused", max_retries=0)


def test_a_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**CHAT)  # type: ignore[call-overload]
    with client.chat.completions.stream(**CHAT, stream_options={"include_usage": True}) as stream:  # type: ignore[arg-type]
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert "pod" in whole.choices[0].message.content
    assert final.usage is not None
    assert final.usage.completion_tokens == whole.usage.completion_tokens


def test_many_streams_at_once(demo_server: ServerThread, client: openai.OpenAI) -> None:
    expected = client.chat.completions.create(**CHAT).choices[0].message.content  # type: ignore[call-overload]

    async def streamed(asking: openai.AsyncOpenAI) -> str:
        chunks = await asking.chat.completions.create(**CHAT, stream=True)  # type: ignore[call-overload]
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{demo_server.url}/v1", api_key="unused") as asking:
            return await asyncio.gather(*(streamed(asking) for _ in range(8)))

    assert asyncio.run(ask()) == [expected] * 8


def test_a_completion_with_log_probabilities(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="demo-chat", prompt="What is", max_tokens=4, logprobs=2, temperature=0)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == answer.choices[0].text
    assert len(logprobs.top_logprobs or []) == 4


def test_models_and_errors(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo-chat"]
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(**{**CHAT, "model": "gpt-4"})  # type: ignore[call-overload]
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(**{**CHAT, "temperature": 9})  # type: ignore[call-overload]
    assert wrong.value.param == "temperature"
