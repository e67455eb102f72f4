"""`python -m hack.training [--out models]`: train target and draft, evaluate them, write folders and model cards.

The committed pair was made with `--start models`: it began with an earlier pair, which `training.json` names. A
training that was stopped goes on where it was. `--evaluate` only measures existing folders.

    knowledge/*.yaml     what the model knows: our own words, one entry per term
    knowledge.py         reads them
    phrasings.py         questions about a term, and which of them training never sees
    conversations.py     an endless, seeded stream of conversations and plain paragraphs
    corpus/              real text of the locked packages: prose, code and chats, with files held out
    tokenizer.py         a byte-level BPE trained on both, with the chat template
    training_text.py     conversations, corpus and tokenizer together
    batches.py           rows of token ids and labels, mixed from the streams
    recipe.py            the two shapes and every hyper-parameter
    optimizer.py         Muon and AdamW
    layer_dropping.py    a start with fewer layers than it was trained with
    train.py             the loop
    checkpoints.py       how it goes on after a stop
    evaluate.py          exact answers and draft agreement on questions that training never saw
    held_out.py          a committed sample of the files that training never saw
    slice_evaluation.py  perplexity and draft agreement on that sample, by slice
    export.py            Hugging Face folders, 16 bit
    card.py              the model cards, from what was measured
    eagle_head.py        the EAGLE head of the target, a command of its own
    eagle_acceptance.py  how many of its drafts stand in the runtime
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from hack.training import card, held_out, knowledge
from hack.training.corpus.documents import Corpus
from hack.training.corpus.sources import SOURCES
from hack.training.evaluate import evaluate, load
from hack.training.export import export
from hack.training.layer_dropping import drop_layers
from hack.training.recipe import DRAFT, ROW_TOKENS, TARGET, Recipe
from hack.training.slice_evaluation import evaluate_slices
from hack.training.train import Run, train
from hack.training.training_text import read_training_text

WATCHED_DOCUMENTS = 12  # of each slice, whenever the loop reports


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m hack.training", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("models"), help="folder for both models (default: models)")
    parser.add_argument("--evaluate", action="store_true", help="only evaluate what is in --out, and write the cards")
    parser.add_argument(
        "--checkpoints", type=Path, default=Path("build/training"), help="folder of checkpoints (default: %(default)s)"
    )
    parser.add_argument("--target-steps", type=int, default=TARGET.steps, help="instead of the recipe's, to try out")
    parser.add_argument("--draft-steps", type=int, default=DRAFT.steps, help="instead of the recipe's, to try out")
    parser.add_argument("--start", type=Path, help="folder with a pair to go on from, with its tokenizer")
    parser.add_argument(
        "--draft-only", action="store_true", help="train the draft for the target that is in --out, which stays"
    )
    options = parser.parse_args(arguments)
    if not options.evaluate:
        steps = {TARGET.name: options.target_steps, DRAFT.name: options.draft_steps}
        _train(
            options.out, options.checkpoints, options.start, steps, (DRAFT,) if options.draft_only else (TARGET, DRAFT)
        )
    _evaluate(options.out)


def _train(out: Path, folder: Path, start: Path | None, steps: dict[str, int], recipes: Sequence[Recipe]) -> None:
    torch.set_flush_denormal(True)  # averages of rare gradients fade into denormal numbers, which are slow
    text = read_training_text(None if start is None else load(start / TARGET.name)[1])
    held_out.write(out / held_out.NAME, text.corpus.held_out)
    for recipe in recipes:
        teacher = load(out / TARGET.name)[0] if recipe is DRAFT else None
        run = Run(
            steps=steps[recipe.name],
            checkpoint=folder / f"{recipe.name}.safetensors",
            fingerprint=text.fingerprint(recipe) + _sha256(start, recipe),
            start=None if start is None else drop_layers(load(start / recipe.name)[0], recipe.num_hidden_layers),
            teacher=teacher,
            watch=partial(_watch, teacher, text.tokenizer, out),
        )
        model, seconds = train(recipe, text.batches(recipe, run.steps), run)
        export(model, text.tokenizer, out / recipe.name)
        _record(out, recipe, run.steps, seconds, text.corpus, _began_with(start, recipe))


def _watch(teacher: LlamaForCausalLM | None, tokenizer: Tokenizer, out: Path, model: LlamaForCausalLM) -> str:
    """Held-out figures of a few documents: of the target alone, or of a draft with it."""
    lines, taken = [], dict[str, int]()
    for line in held_out.read(out / held_out.NAME):
        taken[line["slice"]] = taken.get(line["slice"], 0) + 1
        if taken[line["slice"]] <= WATCHED_DOCUMENTS:
            lines.append(line)
    target, draft = (model, None) if teacher is None else (teacher, model)
    model.eval()
    found = evaluate_slices(target, draft, tokenizer, lines)
    if teacher is None:
        return ", ".join(f"{name} perplexity {one.target_perplexity:.1f}" for name, one in found.items())
    return ", ".join(f"{name} agreement {one.agreement_percent:.1f} %" for name, one in found.items())


def _sha256(start: Path | None, recipe: Recipe) -> str:
    """Of the weights that a training begins with; empty without any."""
    if start is None:
        return ""
    return hashlib.sha256((start / recipe.name / "model.safetensors").read_bytes()).hexdigest()


def _began_with(start: Path | None, recipe: Recipe) -> dict[str, Any]:
    """What `training.json` says of the weights that a training begins with."""
    found: dict[str, Any] = {"start_sha256": _sha256(start, recipe)}
    if start is not None:
        found["start_layers"] = json.loads((start / recipe.name / "config.json").read_text())["num_hidden_layers"]
    return found


def _record(
    out: Path, recipe: Recipe, steps: int, seconds: float, corpus: Corpus, began_with: Mapping[str, Any]
) -> None:
    record = {
        "steps": steps,
        "rows": recipe.rows,
        "row_tokens": ROW_TOKENS,
        "muon_rate": recipe.muon_rate,
        "adam_rate": recipe.adam_rate,
        "seconds": round(seconds),
        "device": card.device_name(),
        **began_with,
        "corpus_sha256": corpus.sha256,
        "sources": [
            {
                "name": source.name,
                "version": source.version,
                "license": source.license,
                "characters": sum(
                    one.characters
                    for one in corpus.training
                    if one.source == source.name and one.slice in recipe.first_shares
                ),
            }
            for source in SOURCES
        ],
    }
    (out / recipe.name / "training.json").write_text(json.dumps(record, indent=2) + "\n")


def _evaluate(out: Path) -> None:
    target, tokenizer = load(out / TARGET.name)
    draft, _ = load(out / DRAFT.name)
    evaluation = evaluate(target, draft, tokenizer, knowledge.load())
    slices = evaluate_slices(target, draft, tokenizer, held_out.read(out / held_out.NAME))
    measured = evaluation.as_json() | {"slices": {name: one.as_json() for name, one in slices.items()}}
    (out / TARGET.name / "evaluation.json").write_text(json.dumps(measured, indent=2) + "\n")
    card.write(out, target, draft, tokenizer, evaluation, slices)
    print(json.dumps(measured, indent=2))


if __name__ == "__main__":
    main()
