"""The model cards, written from what was measured, so that no number in them can be older than the weights."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from hack.training.evaluate import Evaluation, answer_text
from hack.training.recipe import DRAFT, MAX_POSITION_EMBEDDINGS, TARGET, VOCAB_SIZE, Recipe

SAMPLES = (
    "What is a KV cache?",
    "What is a Kubernetes pod?",
    "Why does continuous batching matter?",
    "How does speculative decoding work?",
    "What does tensor parallelism mean?",
    "Tell me about a readiness probe.",
    "What is Millstream?",
    "What is the difference between prefill and decode?",
    "What is the capital of Portugal?",
    "Hello",
)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{len(os.sched_getaffinity(0))} cores of {_processor()}"


def write(
    out: Path, target: LlamaForCausalLM, draft: LlamaForCausalLM, tokenizer: Tokenizer, evaluation: Evaluation
) -> None:
    """models/demo-chat/README.md and models/demo-draft/README.md."""
    samples = "\n".join(f"> **{question}**<br>\n> {answer_text(target, tokenizer, question)}\n" for question in SAMPLES)
    (out / TARGET.name / "README.md").write_text(
        _head(
            TARGET,
            "A small chat model that explains Kubernetes and model serving. It exists for Millstream's demo and tests.",
        )
        + _training(out, TARGET, target)
        + _measured(evaluation.target_perplexity, evaluation.target_exact_percent, evaluation)
        + f"## Ten answers, greedy\n\n{samples}\n"
        + _limits(),
        encoding="utf-8",
    )
    (out / DRAFT.name / "README.md").write_text(
        _head(DRAFT, "The draft of demo-chat for speculative decoding: the same tokenizer, a quarter of its size.")
        + _training(out, DRAFT, draft)
        + _measured(evaluation.draft_perplexity, evaluation.draft_exact_percent, evaluation)
        + f"Its greedy token equals that of demo-chat at **{evaluation.draft_agreement_percent:.1f} %** of the "
        "positions of demo-chat's own answers.\n\n" + _limits(),
        encoding="utf-8",
    )


def _head(recipe: Recipe, purpose: str) -> str:
    return (
        f"---\nlicense: apache-2.0\nlanguage: en\nlibrary_name: transformers\n---\n\n# {recipe.name}\n\n{purpose}\n\n"
    )


def _training(out: Path, recipe: Recipe, model: LlamaForCausalLM) -> str:
    record = json.loads((out / recipe.name / "training.json").read_text())
    text = """## Shape and training

Llama architecture, {millions:.2f} M parameters in bfloat16: {layers} layers, hidden size {hidden}, {heads} query and
{kv_heads} key-value heads of {head_dim}, intermediate size {intermediate}, tied embeddings, {vocabulary} ids of
byte-level BPE. `max_position_embeddings` is {positions}, but training saw rows of {row_tokens} tokens only: longer
contexts run, and the answers get worse.

Data: the sentences of `hack/training/knowledge/*.yaml`, written for this project and under its licence (Apache-2.0),
turned into conversations by `hack/training/conversations.py`. No other text was used. `python -m hack.training` repeats
the training from its seed: {steps} steps of {rows} rows, {tokens:.1f} M tokens, AdamW with a peak learning rate of
{learning_rate}. It took {minutes:.0f} minutes on {device}, shared with other work.

"""
    return text.format(
        millions=sum(parameter.numel() for parameter in model.parameters()) / 1e6,
        layers=recipe.num_hidden_layers,
        hidden=recipe.hidden_size,
        heads=recipe.num_attention_heads,
        kv_heads=recipe.num_key_value_heads,
        head_dim=recipe.head_dim,
        intermediate=recipe.intermediate_size,
        vocabulary=VOCAB_SIZE,
        positions=MAX_POSITION_EMBEDDINGS,
        tokens=record["steps"] * record["rows"] * record["row_tokens"] / 1e6,
        minutes=record["seconds"] / 60,
        **{name: record[name] for name in ("steps", "rows", "row_tokens", "learning_rate", "device")},
    )


def _measured(perplexity: float, exact_percent: float, evaluation: Evaluation) -> str:
    return f"""## Measured

On {evaluation.questions} questions whose wording training never saw with that term ({evaluation.answer_tokens} tokens
of expected answers): perplexity **{perplexity:.3f}**; {exact_percent:.1f} % of the greedy answers are word for word the
expected ones. The held-out part is the wording of the question, not the fact: this model recites what it was taught,
and that is all it is for.

"""


def _limits() -> str:
    return """## Limits

It knows about a hundred terms. It answers questions about other things with a refusal, or with a confident sentence
about the wrong term; do not use it for anything but trying out and testing a server. English only.
"""


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
