"""The folders in models/ keep the promises that the rest of the project stands on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoConfig, GenerationConfig, LlamaForCausalLM
from transformers.generation.configuration_utils import GenerationMode

from hack.training import knowledge
from hack.training.conversations import UNKNOWN
from hack.training.evaluate import answer_text, evaluate, load
from millstream_runtime.server.openai.sampling import SamplingDefaults

MODELS = Path(__file__).parents[3] / "models"
NAMES = ("demo-chat", "demo-draft")


@pytest.fixture(scope="module")
def target() -> tuple[LlamaForCausalLM, Tokenizer]:
    return load(MODELS / "demo-chat")


@pytest.mark.parametrize(("name", "limit"), [("demo-chat", 6_500_000), ("demo-draft", 1_500_000)])
def test_the_models_are_as_small_as_promised_and_16_bit(name: str, limit: int) -> None:
    with safe_open(MODELS / name / "model.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
    assert sum(tensor.numel() for tensor in tensors.values()) <= limit
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def test_all_models_together_stay_small_in_git() -> None:
    assert sum(path.stat().st_size for name in NAMES for path in (MODELS / name).iterdir()) <= 17_000_000


@pytest.mark.parametrize("name", NAMES)
def test_tensor_parallelism_leaves_whole_quantization_groups(name: str) -> None:
    config = AutoConfig.from_pretrained(MODELS / name)
    assert config.num_attention_heads * config.head_dim % 512 == 0  # the input of o_proj
    assert config.intermediate_size % 512 == 0  # the input of down_proj
    assert config.num_key_value_heads % 4 == 0
    assert config.num_key_value_heads < config.num_attention_heads
    assert config.max_position_embeddings == 16384


def test_the_draft_speaks_the_same_ids() -> None:
    first, second = ((MODELS / name / "tokenizer.json").read_bytes() for name in NAMES)
    assert first == second


@pytest.mark.parametrize("name", NAMES)
def test_a_request_that_names_no_temperature_is_answered_greedily(name: str) -> None:
    """The command that `millstream serve` prints names none; sampled at 1, a quarter of the answers was wrong."""
    assert GenerationConfig.from_pretrained(MODELS / name).get_generation_mode() is GenerationMode.GREEDY_SEARCH
    assert SamplingDefaults.from_folder(MODELS / name).temperature == 0


def test_the_card_and_the_evaluation_agree() -> None:
    measured = json.loads((MODELS / "demo-chat" / "evaluation.json").read_text())
    assert measured["target_exact_percent"] >= 95
    assert measured["draft_agreement_percent"] >= 60
    assert f"**{measured['target_perplexity']:.3f}**" in (MODELS / "demo-chat" / "README.md").read_text()
    assert f"**{measured['draft_agreement_percent']:.1f} %**" in (MODELS / "demo-draft" / "README.md").read_text()


@pytest.mark.deep
@pytest.mark.parametrize(("name", "least", "most"), [("prose", 40, 75), ("chat", 40, 75), ("code", 25, 40)])
def test_the_draft_agrees_as_often_as_documented(name: str, least: float, most: float) -> None:
    """On text that training never saw: seldom enough that drafts can fail, and less on code, which it never read."""
    measured = json.loads((MODELS / "demo-chat" / "evaluation.json").read_text())["slices"][name]
    assert least <= measured["agreement_percent"] <= most
    page = (MODELS.parent / "docs" / "demo-model.md").read_text()
    perplexities = f"{measured['target_perplexity']:.1f} | {measured['draft_perplexity']:.1f}"
    assert f"| `{name}` | {perplexities} | {measured['agreement_percent']:.1f} % |" in page


@pytest.mark.deep
def test_the_recorded_evaluation_is_that_of_these_weights(target: tuple[LlamaForCausalLM, Tokenizer]) -> None:
    draft, _ = load(MODELS / "demo-draft")
    sample = knowledge.load()[::16]
    measured = evaluate(target[0], draft, target[1], sample)
    assert measured.draft_agreement_percent >= 60
    assert measured.target_perplexity < 2


def test_the_readmes_question_gets_the_right_answer(target: tuple[LlamaForCausalLM, Tokenizer]) -> None:
    facts = {fact.term: fact for fact in knowledge.load()}
    assert answer_text(*target, "What is a KV cache?") == facts["a KV cache"].answers["what"]


@pytest.mark.deep
@pytest.mark.parametrize(
    "question", ["What is the capital of Portugal?", "How do I cook potatoes?", "Where is Denmark?"]
)
def test_a_question_about_something_else_is_refused(target: tuple[LlamaForCausalLM, Tokenizer], question: str) -> None:
    assert answer_text(*target, question) == UNKNOWN
