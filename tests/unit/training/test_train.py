"""The loop learns, and what it writes can be loaded by transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from hack.training import knowledge
from hack.training.batches import Batch
from hack.training.evaluate import evaluate, load
from hack.training.export import export
from hack.training.recipe import VOCAB_SIZE, Recipe
from hack.training.slice_evaluation import evaluate_slices
from hack.training.tokenizer import train as train_tokenizer
from hack.training.train import Run, learning_rate_at, train

TINY = Recipe(
    name="tiny",
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    steps=40,
    rows=1,
    data_seed=0,
    first_shares={},
    last_shares={},
)


def one_sentence(tokenizer: Tokenizer, text: str) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.tensor([tokenizer.encode(text).ids])
    return ids[:, :-1], ids[:, 1:]


@pytest.mark.deep
def test_a_model_learns_a_sentence_and_survives_export(tmp_path: Path) -> None:
    facts = knowledge.load()
    texts = [text for fact in facts for text in (fact.paragraph, f"What is {fact.term}? {fact.names}")]
    tokenizer = train_tokenizer(texts, vocab_size=1024)
    batch = one_sentence(tokenizer, "A pod is the smallest unit that Kubernetes runs.")
    model, _ = train(TINY, repeat(batch), Run(TINY.steps, tmp_path / "checkpoint"))
    assert model.config.vocab_size == VOCAB_SIZE
    with torch.inference_mode():
        assert (model(batch[0]).logits.argmax(-1) == batch[1]).all()

    export(model, tokenizer, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token == "<|im_end|>"
    assert loaded.generation_config.eos_token_id == [2, 0]
    assert loaded.generation_config.do_sample is False

    again, its_tokenizer = load(tmp_path)
    measured = evaluate(again, again, its_tokenizer, facts[:1])
    assert measured.draft_agreement_percent == 100  # a model drafts for itself without fail
    assert measured.target_exact_percent == 0  # and knows nothing that it was not shown
    assert measured.target_perplexity > 2


def different_batches(vocab_size: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(4)
    while True:
        ids = torch.randint(3, vocab_size, (2, 9), generator=generator)
        yield ids[:, :-1], ids[:, 1:]


@pytest.mark.deep
def test_a_training_that_was_stopped_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = train(TINY, different_batches(VOCAB_SIZE), Run(6, tmp_path / "whole"))

    def stopped() -> Iterator[Batch]:
        yield from islice(different_batches(VOCAB_SIZE), 3)
        raise KeyboardInterrupt

    monkeypatch.setattr("hack.training.train.CHECKPOINT_SECONDS", 0.0)
    run = Run(6, tmp_path / "checkpoint", fingerprint="one")
    with pytest.raises(KeyboardInterrupt):
        train(TINY, stopped(), run)
    resumed, seconds = train(TINY, different_batches(VOCAB_SIZE), run)
    assert seconds > 0
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


def test_a_checkpoint_of_other_text_is_refused(tmp_path: Path) -> None:
    train(TINY, different_batches(VOCAB_SIZE), Run(2, tmp_path / "checkpoint", fingerprint="one"))
    with pytest.raises(ValueError, match="belongs to another recipe"):
        train(TINY, different_batches(VOCAB_SIZE), Run(2, tmp_path / "checkpoint", fingerprint="other"))


def test_rows_of_a_step_count_the_same_in_small_batches(tmp_path: Path) -> None:
    together, apart = (
        train(replace(TINY, micro_rows=rows), different_batches(VOCAB_SIZE), Run(1, tmp_path / str(rows)))[0]
        for rows in (1, 2)
    )
    for name, tensor in together.state_dict().items():
        assert torch.allclose(tensor, apart.state_dict()[name], atol=1e-4), name


@pytest.mark.deep
def test_a_training_can_begin_with_trained_weights(tmp_path: Path) -> None:
    batch = next(different_batches(VOCAB_SIZE))
    start, _ = train(TINY, repeat(batch), Run(TINY.steps, tmp_path / "start"))
    fresh, _ = train(TINY, repeat(batch), Run(1, tmp_path / "fresh"))
    further, _ = train(TINY, repeat(batch), Run(1, tmp_path / "further", start=start))

    def right(model: LlamaForCausalLM) -> int:
        return int((model(input_ids=batch[0]).logits.argmax(-1) == batch[1]).sum())

    assert right(further) > right(fresh) + 4


@pytest.mark.deep
def test_distillation_moves_a_draft_towards_the_targets_distribution(tmp_path: Path) -> None:
    recipe = replace(TINY, distil_from=0.0)
    teacher, _ = train(replace(TINY, data_seed=1), different_batches(VOCAB_SIZE), Run(5, tmp_path / "teacher"))
    batch = next(different_batches(VOCAB_SIZE))

    def divergence(model: LlamaForCausalLM) -> float:
        with torch.inference_mode():
            ours, theirs = (one(input_ids=batch[0]).logits.log_softmax(-1) for one in (model, teacher))
        return float((theirs.exp() * (theirs - ours)).sum(-1).mean())

    begin, end = (
        train(recipe, repeat(batch), Run(steps, tmp_path / str(steps), teacher=teacher))[0] for steps in (1, 40)
    )
    assert divergence(end) < 0.5 * divergence(begin)


def test_the_learning_rate_rises_stays_and_falls() -> None:
    rates = [learning_rate_at(TINY, 100, step) for step in range(1, 101)]
    full = [step for step, rate in enumerate(rates) if rate == 1]
    assert 10 <= len(full) <= 40
    assert rates[: full[0]] == sorted(rates[: full[0]])
    assert rates[full[-1] :] == sorted(rates[full[-1] :], reverse=True)
    assert rates[-1] == pytest.approx(0.02)


@pytest.mark.deep
def test_a_model_agrees_with_itself_on_every_slice(tmp_path: Path) -> None:
    tokenizer = train_tokenizer((fact.paragraph for fact in knowledge.load()), vocab_size=600)
    model, _ = train(TINY, different_batches(600), Run(1, tmp_path / "checkpoint"))
    lines: list[dict[str, Any]] = [
        {"slice": "prose", "text": "A pod is the smallest unit."},
        {"slice": "chat", "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]},
    ]
    found = evaluate_slices(model, model, tokenizer, lines)
    assert found.keys() == {"prose", "chat", "all"}
    assert all(one.agreement_percent == 100 for one in found.values())
    assert found["chat"].tokens == len(tokenizer.encode("Hello.<|im_end|>").ids)
    assert found["prose"].tokens == len(tokenizer.encode("A pod is the smallest unit.").ids) - 1
    assert found["all"].tokens == found["chat"].tokens + found["prose"].tokens
