"""Choices, log-probabilities, echo, penalties and bias, as clients and evaluation tools ask for them."""

from __future__ import annotations

import json
import math
from typing import Any

import openai
import pytest

from millstream_runtime.engine.request import SamplingParams
from millstream_runtime.server.http.api_errors import ApiError
from millstream_runtime.server.openai.requests import CompletionRequest
from millstream_runtime.server.openai.sampling import SamplingDefaults, require_in_vocabulary, sampling_params
from tests.support.server_thread import ServerThread

MESSAGES = [{"role": "user", "content": "What is a pod?"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def chat(server: ServerThread, **body: Any) -> Any:
    answer = server.post(CHAT, {"model": "tiny", "messages": MESSAGES, "max_tokens": 8, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def complete(server: ServerThread, **body: Any) -> Any:
    body = {"model": "tiny", "prompt": list(range(20)), "max_tokens": 8, "temperature": 0, "ignore_eos": True, **body}
    answer = server.post(TEXT, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def texts(answer: Any) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def test_n_seeded_choices_differ_and_repeat_and_the_first_is_the_single_one(server: ServerThread) -> None:
    settings = {"temperature": 1.5, "seed": 5}
    several = complete(server, n=3, **settings)
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2]
    assert len({*texts(several)}) == 3
    assert texts(complete(server, n=3, **settings)) == texts(several)
    assert texts(complete(server, **settings)) == texts(several)[:1]
    assert several["usage"]["prompt_tokens"] == 20
    assert several["usage"]["completion_tokens"] == 24


def test_choices_of_several_prompts_come_prompt_by_prompt_streamed_too(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": "tiny", "max_tokens": 6, "temperature": 1.2, "seed": 5}
    prompts = ["one", "two"]
    alone = [
        choice.text
        for prompt in prompts
        for choice in client.completions.create(prompt=prompt, n=2, **settings).choices
    ]
    together = client.completions.create(prompt=prompts, n=2, **settings)
    assert [choice.text for choice in together.choices] == alone
    streamed = [""] * 4
    for chunk in client.completions.create(prompt=prompts, n=2, stream=True, **settings):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == alone


def test_each_choice_of_a_streamed_chat_opens_and_ends_once(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 5, "n": 2, "stream": True}
    chunks = client.chat.completions.create(**settings)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    for index in (0, 1):
        mine = [choice for choice in choices if choice.index == index]
        assert [choice.delta.role for choice in mine].count("assistant") == 1
        assert [bool(choice.finish_reason) for choice in mine].count(True) == 1


def test_best_of_shows_the_likeliest_and_counts_all(server: ServerThread) -> None:
    settings = {"temperature": 1.5, "seed": 5}
    candidates = complete(server, n=4, logprobs=0, **settings)["choices"]
    means = [sum(one["logprobs"]["token_logprobs"]) / len(one["logprobs"]["token_logprobs"]) for one in candidates]
    order = sorted(range(4), key=lambda index: -means[index])
    best = complete(server, n=2, best_of=4, **settings)
    assert texts(best) == [candidates[index]["text"] for index in order[:2]]
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in best["choices"])
    assert best["usage"]["completion_tokens"] == 32


def test_chat_logprobs_have_bytes_and_alternatives_whole_and_streamed(
    server: ServerThread, client: openai.OpenAI
) -> None:
    whole = chat(server, logprobs=True, top_logprobs=3, ignore_eos=True)["choices"][0]
    content = whole["logprobs"]["content"]
    assert len(content) == 8
    assert (
        bytes(byte for entry in content for byte in entry["bytes"])
        .decode(errors="replace")
        .startswith(whole["message"]["content"][:3])
    )
    for entry in content:
        assert entry["top_logprobs"][0]["logprob"] == pytest.approx(entry["logprob"])  # greedy took the best
        assert len(entry["top_logprobs"]) == 3
        assert entry["logprob"] <= 0
    settings: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    chunks = client.chat.completions.create(
        logprobs=True, top_logprobs=3, stream=True, extra_body={"ignore_eos": True}, **settings
    )
    streamed = [
        entry.model_dump()
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs is not None
        for entry in choice.logprobs.content or ()
    ]
    assert [entry["logprob"] for entry in streamed] == pytest.approx([entry["logprob"] for entry in content], abs=1e-4)
    assert [entry["bytes"] for entry in streamed] == [entry["bytes"] for entry in content]


@pytest.mark.parametrize("as_token_ids", [False, True])
def test_offsets_of_an_echo_point_into_its_text(server: ServerThread, as_token_ids: bool) -> None:
    """The characters of an echo are counted, not those of each token alone: an emoji has four tokens here."""
    text = "x\U0001f600 hello"
    tokens = server.post("/tokenize", {"prompt": text}).json()["tokens"]
    prompt = tokens if as_token_ids else text
    choice = complete(server, prompt=prompt, echo=True, logprobs=0, max_tokens=0)["choices"][0]
    assert choice["text"] == text
    shown = zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True)
    whole = [(token, offset) for token, offset in shown if not token.startswith("bytes:")]
    assert "".join(token for token, _ in whole) == "x hello"
    assert all(text.startswith(token, offset) for token, offset in whole)


def test_offsets_of_an_echo_leave_out_special_tokens_that_it_does_not_show(server: ServerThread) -> None:
    special = server.post("/tokenize", {"messages": MESSAGES}).json()["tokens"][0]
    choice = complete(server, prompt=[special, 71, special, 68], echo=True, logprobs=0, max_tokens=0)["choices"][0]
    assert choice["text"] == "he"
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1]


def test_echo_scores_a_prompt_as_evaluation_tools_ask(server: ServerThread) -> None:
    """lm-eval sends echo, logprobs 1 and one new token; others send max_tokens 0."""
    prompt = [71, 68, 75, 75, 78]  # "hello" in this vocabulary of bytes
    answer = complete(server, prompt=prompt, echo=True, logprobs=1, max_tokens=1)["choices"][0]
    scored = complete(server, prompt=prompt, echo=True, logprobs=1, max_tokens=0)
    logprobs = answer["logprobs"]
    assert answer["text"].startswith("hello")
    assert logprobs["tokens"][:5] == list("hello")
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4, 5]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert all(token in best for token, best in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True))
    only = scored["choices"][0]
    assert only["text"] == "hello"
    assert only["logprobs"]["token_logprobs"][1:] == pytest.approx(logprobs["token_logprobs"][1:5], abs=1e-4)
    assert only["finish_reason"] == "length"
    assert scored["usage"]["completion_tokens"] == 0
    by_text = complete(server, prompt="hello", echo=True, max_tokens=0)["choices"][0]
    assert (by_text["text"], by_text["logprobs"]) == ("hello", None)


def test_an_echo_is_streamed_before_the_answer(server: ServerThread, client: openai.OpenAI) -> None:
    whole = complete(server, prompt="hello", echo=True)["choices"][0]["text"]
    chunks = client.completions.create(
        model="tiny",
        prompt="hello",
        echo=True,
        max_tokens=8,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole
    assert whole.startswith("hello")


def test_prompt_logprobs_have_the_token_its_rank_and_the_best(server: ServerThread) -> None:
    answer = complete(server, prompt_logprobs=2)["choices"][0]
    entries = answer["prompt_logprobs"]
    assert len(entries) == 20
    assert entries[0] is None
    for token_id, entry in enumerate(entries[1:], start=1):
        assert 2 <= len(entry) <= 3
        assert {one["rank"] for one in entry.values()} >= {1, 2}
        assert math.isfinite(entry[str(token_id)]["logprob"])
    assert answer["text"] == complete(server)["choices"][0]["text"]


def test_a_bias_forces_and_forbids_tokens(server: ServerThread) -> None:
    free = complete(server, logprobs=0)["choices"][0]
    assert complete(server, logit_bias={"65": 100}, max_tokens=4)["choices"][0]["text"] == "bbbb"  # "!" is 0
    first = next(
        index for index in range(256) if free["text"] and free["logprobs"]["tokens"][0] == _spelling(server, index)
    )
    assert (
        complete(server, logit_bias={str(first): -100}, logprobs=0)["choices"][0]["logprobs"]["tokens"][0]
        != (free["logprobs"]["tokens"][0])
    )


def _spelling(server: ServerThread, token_id: int) -> str:
    return str(
        complete(server, logit_bias={str(token_id): 100}, max_tokens=1, logprobs=0)["choices"][0]["logprobs"]["tokens"][
            0
        ]
    )


def test_penalties_break_a_repetition(server: ServerThread) -> None:
    biased = {"logit_bias": {"65": 60, "66": 50}, "max_tokens": 16}  # "b" again and again, "c" if that is punished
    assert complete(server, **biased)["choices"][0]["text"] == "b" * 16
    assert "c" in complete(server, frequency_penalty=2, **biased)["choices"][0]["text"]
    assert "c" in complete(server, repetition_penalty=2, **biased)["choices"][0]["text"]


def test_every_parameter_reaches_the_engine_and_the_models_defaults_fill_the_gaps() -> None:
    """Request, then generation_config.json, then the API."""
    given: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.4,
        "frequency_penalty": -0.3,
        "repetition_penalty": 1.1,
        "seed": 3,
        "min_tokens": 1,
        "ignore_eos": True,
        "max_tokens": 9,
        "logprobs": 2,
        "prompt_logprobs": 1,
    }
    everything = given | {"stop_token_ids": [4], "logit_bias": {"9": 2, "8": -1.5}}
    model = SamplingDefaults(temperature=0.6, top_p=0.8, top_k=20, min_p=0.05, repetition_penalty=1.2, max_tokens=50)

    def params(defaults: SamplingDefaults, **body: Any) -> SamplingParams:
        request = CompletionRequest.model_validate({"model": "m", "prompt": "p", **body})
        return sampling_params(request, defaults, prompt_tokens=3, max_model_len=40)

    expected = SamplingParams(**given, stop_token_ids=frozenset({4}), logit_bias=((8, -1.5), (9, 2.0)))
    assert params(model, **everything) == expected
    filled = SamplingParams(37, temperature=0.6, top_p=0.8, top_k=20, min_p=0.05, repetition_penalty=1.2)
    assert params(model) == filled  # fifty tokens would not fit
    assert params(SamplingDefaults()) == SamplingParams(16)
    assert params(model, temperature=0, repetition_penalty=1).is_plain_greedy


def test_priority_and_salt_change_no_answer(server: ServerThread) -> None:
    plain = chat(server)["choices"][0]["message"]
    assert chat(server, priority=-5, cache_salt="tenant")["choices"][0]["message"] == plain


def test_tokenize_tells_what_a_generation_sees_and_detokenize_reverses_it(server: ServerThread) -> None:
    tokens = server.post("/tokenize", {"model": "tiny", "prompt": "hé!", "return_token_strs": True}).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"]) == 4
    assert tokens["max_model_len"] == 2048
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "hé!"}
    chat_tokens = server.post("/tokenize", {"messages": MESSAGES}).json()
    assert chat_tokens["count"] == chat(server)["usage"]["prompt_tokens"]
    assert chat_tokens["token_strs"] is None


END_OF_ANSWER = 258  # of the tiny model


@pytest.mark.parametrize("stream", [False, True])
def test_the_token_that_ends_the_answer_is_in_the_logprobs(server: ServerThread, stream: bool) -> None:
    """lm-eval sends max_tokens 1 and takes all but the last token as the prompt's, whatever the last one is."""
    prompt = [71, 68, 75, 75, 78]
    asked = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 1, "ignore_eos": False}
    scored = complete(server, **{**asked, "max_tokens": 0})["choices"][0]["logprobs"]["token_logprobs"]
    body = {"model": "tiny", "temperature": 0, **asked, "logit_bias": {str(END_OF_ANSWER): 100}, "stream": stream}
    answer = server.post(TEXT, body)
    if stream:
        choices = [json.loads(line[6:])["choices"][0] for line in answer.text.split("\n\n") if '"choices"' in line]
    else:
        choices = answer.json()["choices"]
    logprobs = [value for choice in choices if choice["logprobs"] for value in choice["logprobs"]["token_logprobs"]]
    assert choices[-1]["finish_reason"] == "stop"
    assert "".join(choice["text"] for choice in choices) == "hello"
    assert len(logprobs) == len(prompt) + 1
    assert logprobs[1:-1] == pytest.approx(scored[1:], abs=1e-4)


def test_an_end_of_answer_and_a_stop_string_count_in_chat_logprobs(server: ServerThread) -> None:
    ended = chat(server, logprobs=True, logit_bias={str(END_OF_ANSWER): 100})["choices"][0]
    assert ended["finish_reason"] == "stop"
    assert len(ended["logprobs"]["content"]) == 1
    text = chat(server, ignore_eos=True, logit_bias={"71": 100})["choices"][0]["message"]["content"]
    stopped = chat(server, ignore_eos=True, logit_bias={"71": 100}, logprobs=True, stop=text[1:3])
    assert len(stopped["choices"][0]["logprobs"]["content"]) == stopped["usage"]["completion_tokens"]


@pytest.mark.parametrize("value", [1e-39, 0.0099])
def test_a_penalty_that_arithmetic_cannot_hold_is_a_400(server: ServerThread, value: float) -> None:
    answer = server.post(TEXT, {"model": "tiny", "prompt": "hi", "max_tokens": 4, "repetition_penalty": value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "repetition_penalty"


@pytest.mark.parametrize(
    "extreme",
    [
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 10},
        {"temperature": 1e-39},
        {"top_p": 1e-39, "temperature": 1},
        {"min_p": 1e-39, "temperature": 1},
        {"min_p": 1, "temperature": 2},
        {"presence_penalty": 1e-39, "frequency_penalty": -2},
        {"logit_bias": {"1": 1e-39, "2": -100}},
    ],
)
def test_an_extreme_that_is_accepted_is_answered(server: ServerThread, extreme: dict[str, Any]) -> None:
    assert complete(server, **extreme)["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("route", [CHAT, TEXT])
def test_the_usage_so_far_is_in_each_chunk_that_a_token_makes(server: ServerThread, route: str) -> None:
    """guidellm counts by it: also the tokens that have no text, such as the first bytes of a character."""
    asked = {"messages": MESSAGES} if route == CHAT else {"prompt": "hi"}
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": "tiny", "max_tokens": 12, "temperature": 0, "ignore_eos": True, "n": 2, **asked}
    answer = server.post(route, {**body, "stream": True, "stream_options": options})
    assert answer.status_code == 200, answer.text
    events = [line[6:] for line in answer.text.split("\n\n") if line.startswith("data: {")]
    usages = [json.loads(event)["usage"] for event in events]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts)
    assert set(counts) == set(range(1, 25))
    assert usages[-1]["completion_tokens"] == 24
    assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages)
    without = server.post(route, {**body, "stream": True, "stream_options": {"continuous_usage_stats": True}})
    assert '"usage"' not in without.text  # as in vLLM


def test_stop_tokens_that_leave_none_before_min_tokens_are_a_400() -> None:
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 4, "stop_token_ids": [0, 1, 2]}
    require_in_vocabulary(CompletionRequest.model_validate(body), 3)
    with pytest.raises(ApiError, match="names all 3 tokens") as refused:
        require_in_vocabulary(CompletionRequest.model_validate(body | {"min_tokens": 1}), 3)
    assert (refused.value.status, refused.value.param) == (400, "stop_token_ids")
