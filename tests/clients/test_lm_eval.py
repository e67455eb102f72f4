"""lm-eval's API models, on a task of this file: log-likelihoods against transformers, answers against the server's own.

`local-completions` sends a prompt with its continuation, echoed with log-probabilities, and asks for one token more. It
counts entries from both ends, so an entry for that token must come also where it ends the answer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.clients.conftest import DEMO_MODEL, Program
from tests.support.server_thread import ServerThread

QUESTION = "<|im_start|>user\nWhat is a Kubernetes pod?<|im_end|>\n<|im_start|>assistant"
END = "<|im_end|>"
MAX_TOKENS = 12
LIKELIHOOD_TASK = """
task: likelihoods
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
ANSWER_TASK = """
task: answers
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {max_gen_toks: 12, until: ["\\n\\n"], temperature: 0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture(scope="module")
def reference() -> tuple[Any, Any]:
    """Model and tokenizer of transformers."""
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(DEMO_MODEL)


def whole_answer(server: ServerThread) -> str:
    """An answer after which the model's next token is the end of the turn."""
    body = {"model": "demo-chat", "messages": [{"role": "user", "content": "What is a Kubernetes pod?"}]}
    answer = server.post("/v1/chat/completions", {**body, "temperature": 0, "max_tokens": 400}).json()["choices"][0]
    assert answer["finish_reason"] == "stop"
    return "\n" + str(answer["message"]["content"])


def likelihood(reference: tuple[Any, Any], question: str, answer: str) -> tuple[float, bool]:
    """Sum of the log-probabilities of the answer's tokens, and whether each is the most likely."""
    model, tokenizer = reference
    whole = tokenizer(question + answer, add_special_tokens=False).input_ids
    start = len(tokenizer(question, add_special_tokens=False).input_ids)
    with torch.inference_mode():
        logprobs = model(torch.tensor([whole])).logits[0].float().log_softmax(-1)
    chosen = [logprobs[at - 1, whole[at]].item() for at in range(start, len(whole))]
    greedy = all(int(logprobs[at - 1].argmax()) == whole[at] for at in range(start, len(whole)))
    return sum(chosen), greedy


def evaluated(program: Program, task: str, *arguments: str) -> list[dict[str, Any]]:
    """The samples of a task, in the order of its questions."""
    out = program.folder / "out"
    common = ["--tasks", task, "--include_path", str(program.folder), "--log_samples", "--output_path", str(out)]
    program.run("lm-eval", "run", *arguments, *common)
    (file,) = out.rglob(f"samples_{task}_*.jsonl")
    return sorted((json.loads(line) for line in file.read_text().splitlines()), key=lambda one: one["doc_id"])


def write_task(folder: Path, task: str, questions: list[dict[str, str]]) -> None:
    (folder / "task.yaml").write_text(task)
    (folder / "questions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in questions))


@pytest.mark.parametrize("sends_ids", [True, False], ids=["ids", "text"])
def test_log_likelihoods_are_those_of_transformers_also_before_and_after_an_end_of_turn(
    demo_server: ServerThread, reference: tuple[Any, Any], program: Program, sends_ids: bool
) -> None:
    answer = whole_answer(demo_server)
    questions = [
        {"question": QUESTION, "answer": answer},  # the token that follows ends the answer
        {"question": QUESTION, "answer": answer + END},  # so does the last of its own
        {"question": QUESTION + answer + END, "answer": "\n<|im_start|>user\nWhat is a node?"},
        {"question": "What is a Deployment?", "answer": " It keeps replicas running."},
    ]
    write_task(program.folder, LIKELIHOOD_TASK, questions)
    settings = {
        "model": "demo-chat",
        "base_url": f"{demo_server.url}/v1/completions",
        "tokenizer": str(DEMO_MODEL),
        "tokenizer_backend": "huggingface",
        "tokenized_requests": sends_ids,
        "num_concurrent": 2,
        "max_length": 1024,
    }
    pairs = ",".join(f"{name}={value}" for name, value in settings.items())
    samples = evaluated(program, "likelihoods", "--model", "local-completions", "--model_args", pairs)
    for question, sample in zip(questions, samples, strict=True):
        sent = sample["arguments"]["gen_args_0"]
        assert (sent["arg_0"], sent["arg_1"]) == (question["question"], question["answer"])
        found, is_greedy = sample["resps"][0][0]
        expected, expected_greedy = likelihood(reference, **question)
        assert float(found) == pytest.approx(expected, rel=0.01, abs=0.05), question
        assert (is_greedy == "True") is expected_greedy, question


@pytest.mark.parametrize("model", ["local-completions", "local-chat-completions"])
def test_answers_are_those_of_the_server(demo_server: ServerThread, program: Program, model: str) -> None:
    questions = [{"question": text, "answer": ""} for text in ("What is a pod?", "What is a Deployment?")]
    write_task(program.folder, ANSWER_TASK, questions)
    is_chat = model == "local-chat-completions"
    route = "/v1/chat/completions" if is_chat else "/v1/completions"
    pairs = f"model=demo-chat,base_url={demo_server.url}{route},num_concurrent=2,tokenizer={DEMO_MODEL}"
    chat = ["--apply_chat_template"] if is_chat else []
    samples = evaluated(program, "answers", "--model", model, "--model_args", pairs, *chat)
    for question, sample in zip(questions, samples, strict=True):
        body = {"model": "demo-chat", "max_tokens": MAX_TOKENS, "temperature": 0, "stop": ["\n\n"]}
        if is_chat:
            body["messages"] = [{"role": "user", "content": question["question"]}]
        else:
            body["prompt"] = question["question"]
        choice = demo_server.post(route, body).json()["choices"][0]
        assert sample["resps"][0][0] == (choice["message"]["content"] if is_chat else choice["text"])
