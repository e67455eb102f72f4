"""The model cards, written from what was measured, so that no number in them can be older than the weights."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from hack.training.corpus.documents import CODE
from hack.training.evaluate import Evaluation, answer_text
from hack.training.recipe import DEMO, DRAFT, MAX_POSITION_EMBEDDINGS, TARGET, VOCAB_SIZE, Recipe
from hack.training.slice_evaluation import SliceEvaluation

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


def device_name() -> str:
    return f"{len(os.sched_getaffinity(0))} cores of {_processor()}"


def write(
    out: Path,
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    tokenizer: Tokenizer,
    evaluation: Evaluation,
    slices: Mapping[str, SliceEvaluation],
) -> None:
    """The README.md of both folders."""
    samples = "\n".join(f"> **{question}**<br>\n> {answer_text(target, tokenizer, question)}\n" for question in SAMPLES)
    (out / TARGET.name / "README.md").write_text(
        _head(
            TARGET,
            "A small model that explains terms of Kubernetes and of model serving. It read documentation and code too, "
            "so that quantization and speculative decoding can be judged on it.",
        )
        + _training(out, TARGET, target)
        + _measured(evaluation.target_perplexity, evaluation.target_exact_percent, evaluation)
        + _measured_on_slices(slices)
        + f"## Ten answers, greedy\n\n{samples}\n"
        + _limits(),
        encoding="utf-8",
    )
    (out / DRAFT.name / "README.md").write_text(
        _head(
            DRAFT,
            f"The draft of {TARGET.name}: the same tokenizer, a sixth of its size, and no code in its training.",
        )
        + _training(out, DRAFT, draft)
        + _measured(evaluation.draft_perplexity, evaluation.draft_exact_percent, evaluation)
        + f"Its greedy token equals that of {TARGET.name} at **{evaluation.draft_agreement_percent:.1f} %** of the "
        f"positions of {TARGET.name}'s own answers.\n\n" + _measured_on_slices(slices) + _limits(),
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

Data, first: the sentences of `hack/training/knowledge/*.yaml`, written for this project and under its licence
(Apache-2.0), turned into conversations by `hack/training/conversations.py`. Data, second: documentation{code} of these
packages, as `hack/training/corpus` reads them; one file in sixteen is held out. A character may be seen several times
or never.

{sources}

`python -m hack.training` repeats the training from its seed: {steps} steps of {rows} rows, {tokens:.1f} M tokens, of
which the demo's conversations are {first_demo:.0%} of the rows at the begin and {last_demo:.0%} at the end; Muon with a
peak learning rate of {muon_rate} for the layers, AdamW with {adam_rate} for the rest.{distilled}{start} It took
{minutes:.0f} minutes on {device}, shared with other work.{note} The order of the text is the same each time; the
weights are the same to the bit only on the same processor and with the same versions.

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
        code=" and code" if CODE in recipe.first_shares else ", and no code,",
        first_demo=recipe.first_shares[DEMO],
        last_demo=recipe.last_shares[DEMO],
        distilled=_distilled(recipe),
        start=_start(record, recipe),
        note=record.get("note", ""),
        sources=_sources(record["sources"]),
        **{name: record[name] for name in ("steps", "rows", "row_tokens", "muon_rate", "adam_rate", "device")},
    )


def _distilled(recipe: Recipe) -> str:
    if recipe.distil_from >= 1:
        return ""
    return f" From {recipe.distil_from:.0%} of the steps on it learns the distributions of {TARGET.name}."


def _start(record: Mapping[str, Any], recipe: Recipe) -> str:
    if not record["start_sha256"]:
        return ""
    dropped = record.get("start_layers", recipe.num_hidden_layers) != recipe.num_hidden_layers
    layers = f"{recipe.num_hidden_layers} of the {record['start_layers']} layers" if dropped else "the weights"
    return (
        f" It began with {layers} of an earlier training (sha256 "
        f"`{record['start_sha256'][:16]}…`) and its tokenizer, at {recipe.continued_rate:g} of these rates."
    )


def _sources(rows: list[dict[str, object]]) -> str:
    lines = [f"| {row['name']} | {row['version']} | {row['license']} | {row['characters']:,} |" for row in rows]
    return "\n".join(["| package | version | licence | characters |", "|---|---|---|---|", *lines])


def _measured(perplexity: float, exact_percent: float, evaluation: Evaluation) -> str:
    return f"""## Measured

On {evaluation.questions} questions whose wording training never saw with that term ({evaluation.answer_tokens} tokens
of expected answers): perplexity **{perplexity:.3f}**; {exact_percent:.1f} % of the greedy answers are word for word the
expected ones. The held-out part is the wording of the question, not the fact: about its terms this model recites what
it was taught.

"""


def _measured_on_slices(slices: Mapping[str, SliceEvaluation]) -> str:
    rows = "\n".join(
        f"| {name} | {one.documents} | {one.tokens:,} | {one.target_perplexity:.1f} | {one.draft_perplexity:.1f} "
        f"| {one.agreement_percent:.1f} % |"
        for name, one in slices.items()
    )
    return f"""On text of files that training never saw (`models/held_out.jsonl`, from the packages above):

| slice | documents | tokens | perplexity, {TARGET.name} | perplexity, {DRAFT.name} | both choose the same token |
|---|---|---|---|---|---|
{rows}

"""


def _limits() -> str:
    return """## Limits

It knows about a hundred terms. It answers questions about other things with a refusal, or with a confident sentence
about the wrong term. Other text it continues with words that fit and mean little: that is for studies of quantization
and speculative decoding. Do not use it for anything but trying out and testing a server. English only.
"""


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
