"""A folder that is quantized already is served as it is, with the probabilities that compressed-tensors computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.cluster import Cluster
from e2e.deployments import FLOAT32_ENGINE, MODEL, condition, llmd, pods, wait_ready
from e2e.durations import Durations
from e2e.model_artifact import MODELS, push_model
from e2e.release import Release
from e2e.test_sources import INSIDE, fetched, with_env
from millstream.commands.quantize import run as quantize

REPOSITORY = "millstream-e2e/quantized"
QUESTION = "Why are requests batched?"
# Both sides multiply the same codes and scales in float32 and round each sum. Rounding the weights to 8 bits moves the
# most moved of these logarithms by about 0.02.
ROUNDING, SHIFT_BY_QUANTIZATION = 1e-4, 2e-3


def log_probs_of(folder: Path, answer: str) -> list[float]:
    """What `transformers` gives each token of the answer; compressed-tensors decodes the weights of a quantized folder.

    Weights only: on a CPU the runtime does not round activations, which `input_activations` would ask for.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    messages = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    said = tokenizer(answer, add_special_tokens=False, return_tensors="pt")["input_ids"]
    tokens = torch.cat([prompt["input_ids"], said], dim=1)
    with torch.inference_mode():
        model(tokens)  # the first call decodes the weights
        for module in model.modules():
            if hasattr(module, "quantization_scheme"):
                module.quantization_enabled = False
        logits = model(tokens).logits[0, -said.shape[1] - 1 : -1]
    return [float(row[token]) for row, token in zip(logits.log_softmax(-1), said[0], strict=True)]


def farthest(given: list[float], expected: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(given, expected, strict=False))


@pytest.mark.quick
def test_a_quantized_folder_is_served_with_the_probabilities_of_its_weights(
    cluster: Cluster, release: Release, warm_image: None, namespace: str, tmp_path: Path, durations: Durations
) -> None:
    folder = tmp_path / "fp8"
    made = ["--method", "fp8", "--device", "cpu", "--no-quality", "--out", str(folder)]
    assert quantize([str(MODELS / MODEL), *made]) == 0
    digest = push_model(folder, REPOSITORY, "fp8")
    model = {"servedName": MODEL, "source": {"image": {"reference": f"{INSIDE}/{REPOSITORY}:fp8"}}}
    with durations.measure("quantized model from a registry -> Ready"):
        deployment = llmd("quantized", model=model, engine=FLOAT32_ENGINE)
        cluster.apply(namespace, with_env(deployment, PLAIN_HTTP_REGISTRIES=INSIDE))
        ready = wait_ready(cluster, namespace, "quantized")
    assert ready["status"]["plan"]["quantization"] == "FP8"
    assert condition(ready, "ModelReady")["status"] == "True"
    (pod,) = pods(cluster, namespace, "quantized")
    assert fetched(pod)["revision"] == digest
    asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}]}
    with cluster.port_forward(namespace, "service/quantized", 80) as port:
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        answer = httpx.post(url, json=asked | {"temperature": 0, "max_tokens": 48, "logprobs": True}, timeout=60)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    given = [token["logprob"] for token in choice["logprobs"]["content"]]
    text = choice["message"]["content"]
    expected = log_probs_of(folder, text)
    assert len(expected) > 10
    assert farthest(given, expected) < ROUNDING
    assert farthest(given, log_probs_of(MODELS / MODEL, text)) > SHIFT_BY_QUANTIZATION, "these are the 16-bit weights"
