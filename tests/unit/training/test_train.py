"""The loop learns, and what it writes can be loaded by transformers."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from hack.training import knowledge
from hack.training.evaluate import evaluate, load
from hack.training.export import export
from hack.training.recipe import VOCAB_SIZE, Recipe
from hack.training.tokenizer import train as train_tokenizer
from hack.training.train import learning_rate_at, train

TINY = Recipe(
    name="tiny",
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    steps=30,
    rows=1,
    learning_rate=1e-2,
    data_seed=0,
)


def one_sentence(tokenizer: Tokenizer, text: str) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.tensor([tokenizer.encode(text).ids])
    return ids[:, :-1], ids[:, 1:]


def test_a_model_learns_a_sentence_and_survives_export(tmp_path: Path) -> None:
    facts = knowledge.load()
    texts = [text for fact in facts for text in (fact.paragraph, f"What is {fact.term}? {fact.names}")]
    tokenizer = train_tokenizer(texts, vocab_size=1024)
    batch = one_sentence(tokenizer, "A pod is the smallest unit that Kubernetes runs.")
    model = train(TINY, iter([batch] * TINY.steps), torch.device("cpu"))
    assert model.config.vocab_size == VOCAB_SIZE
    with torch.inference_mode():
        assert (model(batch[0]).logits.argmax(-1) == batch[1]).all()

    export(model, tokenizer, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token == "<|im_end|>"
    assert loaded.generation_config.eos_token_id == [2, 0]

    again, its_tokenizer = load(tmp_path)
    measured = evaluate(again, again, its_tokenizer, facts[:1])
    assert measured.draft_agreement_percent == 100  # a model drafts for itself without fail
    assert measured.target_exact_percent == 0  # and knows nothing that it was not shown
    assert measured.target_perplexity > 2


def test_the_learning_rate_rises_then_falls() -> None:
    rate = learning_rate_at(TINY, 100)
    rates = [rate(step) for step in range(100)]
    peak = rates.index(max(rates))
    assert 0 < peak < 50
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] < rates[peak] / 20
