"""What target and draft read: the demo's conversations and the corpus, the tokenizer made from both, the batches."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from hack.training import knowledge
from hack.training.batches import Batch, conversation_rows, mixed_batches, packed_rows
from hack.training.conversations import Conversations
from hack.training.corpus.documents import CHAT, CODE, PROSE, Corpus, read_corpus
from hack.training.recipe import DEMO, ROW_TOKENS, VOCAB_SIZE, Recipe
from hack.training.tokenizer import train

# Of the tokenizer's text: as much of the demo's few words as of all prose, so that its answers stay short in tokens.
TOKENIZER_CHARACTERS = {DEMO: 1_200_000, PROSE: 1_200_000, CHAT: 800_000, CODE: 800_000}


@dataclass(frozen=True, slots=True)
class TrainingText:
    """The same packages give the same text, in the same order."""

    facts: list[knowledge.Fact]
    corpus: Corpus
    tokenizer: Tokenizer

    def batches(self, recipe: Recipe, steps: int) -> Iterator[Batch]:
        """The recipe's batches, from its seed."""
        streams = {DEMO: conversation_rows(Conversations(self.facts, recipe.data_seed), self.tokenizer, ROW_TOKENS)}
        for name in recipe.first_shares:
            if name != DEMO:
                documents = [document for document in self.corpus.training if document.slice == name]
                streams[name] = packed_rows(documents, self.tokenizer, ROW_TOKENS, recipe.data_seed)
        return mixed_batches(streams, recipe.shares_at(steps), recipe.rows)

    def fingerprint(self, recipe: Recipe) -> str:
        """Of all that decides the weights, but for the machine and the number of steps, which a stop may change."""
        parts = (replace(recipe, steps=0), self.corpus.sha256, self.tokenizer.to_str(), self.facts)
        return hashlib.sha256(repr(parts).encode()).hexdigest()


def read_training_text(tokenizer: Tokenizer | None = None) -> TrainingText:
    """From the files of the installed packages; half a minute. Without a tokenizer it trains one."""
    facts, corpus = knowledge.load(), read_corpus()
    if tokenizer is not None:
        return TrainingText(facts, corpus, tokenizer)
    texts = (text for name, limit in TOKENIZER_CHARACTERS.items() for text in _texts(name, limit, facts, corpus))
    return TrainingText(facts, corpus, train(texts, VOCAB_SIZE))


def _texts(name: str, limit_characters: int, facts: list[knowledge.Fact], corpus: Corpus) -> Iterator[str]:
    """Of one stream, in a seeded order, until the limit is reached."""
    left = limit_characters
    for text in _conversation_texts(facts) if name == DEMO else _corpus_texts(corpus, name):
        yield text
        left -= len(text)
        if left <= 0:
            return


def _conversation_texts(facts: list[knowledge.Fact]) -> Iterator[str]:
    for item in Conversations(facts, seed=0):
        yield from [item] if isinstance(item, str) else [message.content for message in item]


def _corpus_texts(corpus: Corpus, name: str) -> Iterator[str]:
    documents = [document for document in corpus.training if document.slice == name]
    for document in random.Random(0).sample(documents, len(documents)):
        content = document.content
        yield from [content] if isinstance(content, str) else [message.content for message in content]
