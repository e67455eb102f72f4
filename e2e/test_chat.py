"""The model that serves is the model of the checkout, and speaks the OpenAI API."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from e2e.deployments import MODEL, Served
from millstream_kernels.cpu.code_folder import cpu_flags, unsupported_machine

FOLDER = Path(__file__).resolve().parent.parent / "models" / MODEL
QUESTIONS = ("What is a KV cache?", "What is a Kubernetes pod?", "Why are requests batched?")
MAX_TOKENS = 96


@dataclass(frozen=True, slots=True)
class Reference:
    """What transformers says."""

    text: str
    tokens: int
    prompt_tokens: int


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def reference() -> Any:
    """Greedy answers of `transformers` on the same folder, in the arithmetic that the runtime uses on a CPU."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(2)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()

    def answer(question: str) -> Reference:
        prompt = tokenizer.apply_chat_template(
            messages(question), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.inference_mode():
            ids = model.generate(**prompt, do_sample=False, max_new_tokens=MAX_TOKENS)[0]
        prompt_tokens = prompt["input_ids"].shape[1]
        new = ids[prompt_tokens:]
        return Reference(tokenizer.decode(new, skip_special_tokens=True), len(new), prompt_tokens)

    return answer


def messages(question: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": question}]


@pytest.mark.quick
@pytest.mark.parametrize("question", QUESTIONS)
def test_a_streamed_answer_is_the_greedy_answer_of_transformers(
    client: openai.OpenAI, reference: Any, question: str
) -> None:
    expected = reference(question)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=messages(question),
        temperature=0,
        max_tokens=MAX_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(pieces) == expected.text
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (expected.prompt_tokens, expected.tokens)
    assert sum(1 for piece in pieces if piece) > 5, "a stream comes in pieces"


def test_a_plain_answer_is_the_streamed_one(client: openai.OpenAI, reference: Any) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=messages(QUESTIONS[0]), temperature=0, max_tokens=MAX_TOKENS
    )
    assert answer.choices[0].message.content == reference(QUESTIONS[0]).text
    assert answer.choices[0].finish_reason == "stop"


def test_completions_stop_at_max_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="A pod is", temperature=0, max_tokens=4)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


def test_the_model_is_listed_under_its_served_name(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_a_bad_request_gets_an_error_object_that_names_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=messages("hello"), temperature=-1)
    assert "temperature" in str(caught.value.body)
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="no-such-model", messages=messages("hello"))
    assert "no-such-model" in str(unknown.value.body)


def test_decodes_are_computed_by_the_kernel_that_the_image_brings(served: Served) -> None:
    """The node is this machine, so what can run here can run in a pod; there is no numba and no compiler in it."""
    problem = unsupported_machine(platform.system(), platform.machine(), cpu_flags())
    chosen = httpx.get(f"{served.url}/ready", timeout=10).json()["kernels"]["decode_attention"]
    assert (chosen["backend"], chosen["reason"]) == (
        ("numba", "the kernel takes this model") if problem is None else ("torch", problem)
    )
