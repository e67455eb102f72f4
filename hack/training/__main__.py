"""`python -m hack.training [--out models]`: train target and draft, evaluate them, write folders and model cards.

About half an hour on two cores, minutes on a GPU. `--evaluate` only measures existing folders.

    knowledge/*.yaml   what the model knows: our own words, one entry per term
    knowledge.py       reads them
    phrasings.py       questions about a term, and which of them training never sees
    conversations.py   an endless, seeded stream of conversations and plain paragraphs
    tokenizer.py       a byte-level BPE trained on that stream, with the chat template
    batches.py         rows of token ids and labels
    recipe.py          the two shapes and every hyper-parameter
    train.py           the loop
    evaluate.py        perplexity, exact answers and draft agreement on questions that training never saw
    export.py          Hugging Face folders, 16 bit
    card.py            the model cards, from what was measured
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch

from hack.training import card, knowledge
from hack.training.batches import batches
from hack.training.conversations import Conversations
from hack.training.evaluate import evaluate, load
from hack.training.export import export
from hack.training.recipe import DRAFT, ROW_TOKENS, TARGET, VOCAB_SIZE, Recipe
from hack.training.tokenizer import train as train_tokenizer
from hack.training.train import train

TOKENIZER_ROWS = 4000


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m hack.training", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("models"), help="folder for both models (default: models)")
    parser.add_argument("--evaluate", action="store_true", help="only evaluate what is in --out, and write the cards")
    parser.add_argument("--steps", type=int, help="fewer steps than the recipe's, to try things out")
    options = parser.parse_args(arguments)
    if not options.evaluate:
        _train(options.out, options.steps)
    _evaluate(options.out)


def _train(out: Path, steps: int | None) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    facts = knowledge.load()
    tokenizer = train_tokenizer(_texts(facts), VOCAB_SIZE)
    for recipe in (TARGET, DRAFT):
        began = time.monotonic()
        data = batches(Conversations(facts, recipe.data_seed), tokenizer, recipe.rows, ROW_TOKENS)
        model = train(recipe, data, device, steps)
        export(model.cpu(), tokenizer, out / recipe.name)
        _record(out, recipe, steps or recipe.steps, time.monotonic() - began, device)


def _texts(facts: list[knowledge.Fact]) -> list[str]:
    texts = []
    for item in islice(Conversations(facts, seed=0), TOKENIZER_ROWS):
        texts += [item] if isinstance(item, str) else [message.content for message in item]
    return texts


def _record(out: Path, recipe: Recipe, steps: int, seconds: float, device: torch.device) -> None:
    record = {
        "steps": steps,
        "rows": recipe.rows,
        "row_tokens": ROW_TOKENS,
        "learning_rate": recipe.learning_rate,
        "seconds": round(seconds),
        "device": card.device_name(device),
    }
    (out / recipe.name / "training.json").write_text(json.dumps(record, indent=2) + "\n")


def _evaluate(out: Path) -> None:
    target, tokenizer = load(out / TARGET.name)
    draft, _ = load(out / DRAFT.name)
    evaluation = evaluate(target, draft, tokenizer, knowledge.load())
    (out / TARGET.name / "evaluation.json").write_text(json.dumps(evaluation.as_json(), indent=2) + "\n")
    card.write(out, target, draft, tokenizer, evaluation)
    print(json.dumps(evaluation.as_json(), indent=2))


if __name__ == "__main__":
    main()
