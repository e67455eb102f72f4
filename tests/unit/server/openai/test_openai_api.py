"""The `openai` client against a real server: what a user sees is what OpenAI's API promises."""

from __future__ import annotations

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from tests.support.server_thread import ServerThread

MESSAGES = [{"role": "user", "content": "What is a pod?"}]


def chat_text(client: openai.OpenAI, **overrides: object) -> str:
    settings = {"model": "tiny", "messages": MESSAGES, "max_tokens": 24, "temperature": 0, **overrides}
    return client.chat.completions.create(**settings).choices[0].message.content or ""  # type: ignore[call-overload]


def stream(client: openai.OpenAI, **overrides: object) -> list[ChatCompletionChunk]:
    settings = {"model": "tiny", "messages": MESSAGES, "max_tokens": 24, "temperature": 0, "stream": True, **overrides}
    return list(client.chat.completions.create(**settings))  # type: ignore[call-overload]


def joined(chunks: list[ChatCompletionChunk]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_a_plain_chat_has_every_field_of_the_specification(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=5, temperature=0)  # type: ignore[arg-type]
    assert answer.object == "chat.completion"
    assert answer.model == "tiny"
    assert answer.id.startswith("chatcmpl-")
    choice = answer.model_dump(exclude_unset=True)["choices"][0]
    assert choice["logprobs"] is None
    assert choice["message"]["refusal"] is None
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5


def test_a_stream_is_the_plain_answer_in_pieces(client: openai.OpenAI) -> None:
    chunks = stream(client)
    assert joined(chunks) == chat_text(client)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    assert chunks[-1].choices[0].delta.content is None
    assert len({chunk.id for chunk in chunks}) == 1
    assert all("usage" not in chunk.model_fields_set for chunk in chunks)


def test_include_usage_adds_a_last_chunk_without_choices(client: openai.OpenAI) -> None:
    chunks = stream(client, stream_options={"include_usage": True})
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24
    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in chunks[:-1])


def test_a_stream_ends_with_done(server: ServerThread) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 2, "stream": True}
    answer = server.post("/v1/chat/completions", body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("data: [DONE]\n\n")


def test_greedy_answers_repeat_and_so_do_seeded_ones(client: openai.OpenAI) -> None:
    assert chat_text(client) == chat_text(client)
    seeded = [chat_text(client, temperature=1.5, seed=seed) for seed in (7, 7, -8)]
    assert seeded[0] == seeded[1] != seeded[2]


def test_a_zero_nucleus_and_a_tiny_temperature_are_greedy(client: openai.OpenAI) -> None:
    assert chat_text(client, temperature=2, top_p=0) == chat_text(client, temperature=1e-9) == chat_text(client)


def test_top_k_of_one_is_greedy(client: openai.OpenAI) -> None:
    assert chat_text(client, temperature=2, extra_body={"top_k": 1}) == chat_text(client)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_stop_string_ends_the_answer_before_itself(client: openai.OpenAI, streamed: bool) -> None:
    whole = chat_text(client, max_tokens=60)
    stop = whole[20:23]  # one token is one byte here, so three characters are at least three tokens
    expected = whole[: whole.index(stop)]
    if streamed:
        chunks = stream(client, max_tokens=60, stop=[stop, "never"])
        assert joined(chunks) == expected
        assert chunks[-1].choices[0].finish_reason == "stop"
    else:
        assert chat_text(client, max_tokens=60, stop=stop) == expected


def test_a_stop_string_that_never_comes_takes_nothing_away(client: openai.OpenAI) -> None:
    whole = chat_text(client)
    assert joined(stream(client, stop=[whole[-1] + "never"])) == whole


def test_min_tokens_hold_stop_strings_off(client: openai.OpenAI) -> None:
    whole = chat_text(client)
    assert chat_text(client, stop=whole[0]) == ""
    assert chat_text(client, stop=whole[0], extra_body={"min_tokens": 12}).startswith(whole[:6])


def test_a_stop_token_id_is_not_part_of_the_answer(client: openai.OpenAI, server: ServerThread) -> None:
    answer = server.post(
        "/v1/completions", {"model": "tiny", "prompt": "ab", "max_tokens": 30, "temperature": 0, "stream": False}
    ).json()
    text = answer["choices"][0]["text"]
    letter = next(character for character in text if character.isascii() and character.isprintable())
    token_id = sorted({*map(chr, range(0x21, 0x7F))}).index(letter)  # the alphabet of bytes starts with "!"
    body = {"model": "tiny", "prompt": "ab", "max_tokens": 30, "temperature": 0, "stop_token_ids": [token_id]}
    stopped = server.post("/v1/completions", body).json()
    assert stopped["choices"][0]["text"] == text[: text.index(letter)]
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["usage"]["completion_tokens"] >= 1


def test_content_parts_and_strings_give_the_same_answer(client: openai.OpenAI) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is a pod?"}]}]
    assert chat_text(client, messages=parts) == chat_text(client)


def test_the_answer_can_be_sent_back_as_history(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=4, temperature=0)  # type: ignore[arg-type]
    history = [*MESSAGES, first.choices[0].message, {"role": "user", "content": "And then?"}]
    assert chat_text(client, messages=history)


def test_completions_of_text_and_of_its_token_ids_agree(client: openai.OpenAI) -> None:
    settings = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    by_text = client.completions.create(prompt='!"#', **settings)  # type: ignore[call-overload]
    by_ids = client.completions.create(prompt=[0, 1, 2], **settings)  # type: ignore[call-overload]
    assert by_text.choices[0].text == by_ids.choices[0].text
    assert by_text.usage.prompt_tokens == 3


def test_each_prompt_of_a_list_becomes_a_choice(client: openai.OpenAI) -> None:
    settings = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    prompts = ["one", "two", "three"]
    alone = [client.completions.create(prompt=prompt, **settings).choices[0].text for prompt in prompts]  # type: ignore[call-overload]
    together = client.completions.create(prompt=prompts, **settings)  # type: ignore[call-overload]
    assert [choice.text for choice in together.choices] == alone
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    streamed = ["", "", ""]
    for chunk in client.completions.create(prompt=prompts, stream=True, **settings):  # type: ignore[call-overload]
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == alone


def test_completions_default_to_sixteen_tokens_and_chats_to_the_context(client: openai.OpenAI) -> None:
    completion = client.completions.create(model="tiny", prompt="a", temperature=0, extra_body={"ignore_eos": True})
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 16
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "x" * 2000}],
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert chat.usage is not None
    assert chat.usage.total_tokens == 2048
    assert chat.choices[0].finish_reason == "length"


def test_models_list_and_retrieve(client: openai.OpenAI) -> None:
    listed = client.models.list().data
    assert [model.id for model in listed] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "millstream"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_an_error_reaches_the_client_as_openai_words_it(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat_text(client, temperature=3)
    assert caught.value.param == "temperature"
    assert caught.value.type == "invalid_request_error"
    assert "from 0 to 2" in caught.value.message


def test_request_ids_are_echoed_when_plain_and_replaced_when_not(server: ServerThread) -> None:
    import httpx

    assert httpx.get(server.url + "/version", headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
    hostile = httpx.get(server.url + "/version", headers={"X-Request-Id": "a b;c=1"}).headers["x-request-id"]
    assert hostile != "a b;c=1"
    assert len(hostile) == 32


def test_ready_tells_the_phase_the_model_and_the_configuration(server: ServerThread) -> None:
    answer = server.get("/ready")
    assert answer.status_code == 200
    body = answer.json()
    assert (body["ready"], body["phase"], body["model"]) == (True, "Ready", "tiny")
    assert body["config_hash"] == server.config.config_hash()
    assert list(body["boot_seconds"]) == ["Starting", "LoadingWeights", "SizingKVCache", "WarmingUp"]


def test_generation_config_gives_the_defaults_and_the_request_wins(tmp_path: object) -> None:
    from pathlib import Path

    from millstream_runtime.server.openai.sampling import SamplingDefaults

    folder = Path(str(tmp_path))
    assert SamplingDefaults.from_folder(folder) == SamplingDefaults(1.0, 1.0, 0)
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9, "top_k": 20, "do_sample": true}')
    assert SamplingDefaults.from_folder(folder) == SamplingDefaults(0.6, 0.9, 20)
    (folder / "generation_config.json").write_text('{"do_sample": false, "temperature": "hot", "top_p": 7}')
    assert SamplingDefaults.from_folder(folder) == SamplingDefaults(0.0, 1.0, 0)
