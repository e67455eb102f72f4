"""Rows of token ids and labels, all of one length, so that every step costs the same; several streams make a batch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from tokenizers import Tokenizer

from hack.training.conversations import Conversations
from hack.training.corpus.documents import CorpusDocument
from hack.training.tokenizer import END_OF_TEXT, encode_chat

IGNORED = -100  # the label that cross-entropy skips
Row = tuple[torch.Tensor, torch.Tensor]  # ids and labels, int64 of shape (tokens,); a label is the token after its id
Batch = tuple[torch.Tensor, torch.Tensor]  # the same, of shape (rows, tokens)


def conversation_rows(conversations: Conversations, tokenizer: Tokenizer, row_tokens: int) -> Iterator[Row]:
    """Endless rows of the demo's conversations.

    A row starts where a conversation starts, since that is where the first question of a user stands.
    """
    end = _end(tokenizer)
    for item in conversations:
        tokens, learnt = _encode(tokenizer, item, end)
        missing = row_tokens + 1 - len(tokens)
        yield _row(tokens[: row_tokens + 1] + [end] * missing, learnt[: row_tokens + 1] + [False] * missing)


def packed_rows(documents: Sequence[CorpusDocument], tokenizer: Tokenizer, row_tokens: int, seed: int) -> Iterator[Row]:
    """Endless rows cut from documents that stand one after another, without padding, in another order each epoch."""
    end = _end(tokenizer)
    order = random.Random(seed)
    tokens: list[int] = []
    learnt: list[bool] = []
    while documents:
        for document in order.sample(documents, len(documents)):
            content = document.content
            new, new_learnt = _encode(tokenizer, content if isinstance(content, str) else list(content), end)
            tokens += new if isinstance(content, str) else [*new, end]
            learnt += new_learnt if isinstance(content, str) else [*new_learnt, False]
            while len(tokens) > row_tokens:
                yield _row(tokens[: row_tokens + 1], learnt[: row_tokens + 1])
                tokens, learnt = tokens[row_tokens:], learnt[row_tokens:]


def mixed_batches(
    streams: Mapping[str, Iterator[Row]], shares_at: Callable[[int], Mapping[str, float]], rows: int
) -> Iterator[Batch]:
    """Endless batches; `shares_at(batch)` gives the share of each stream, which sums to 1.

    Shares are kept to within a row at all times: each row comes from the stream that is furthest behind its share.
    """
    owed = dict.fromkeys(streams, 0.0)
    batch = 0
    while True:
        shares, chosen = shares_at(batch), []
        for _ in range(rows):
            for name in owed:
                owed[name] += shares[name]
            name = max(owed, key=lambda name: owed[name])
            owed[name] -= 1
            chosen.append(next(streams[name]))
        yield torch.stack([ids for ids, _ in chosen]), torch.stack([labels for _, labels in chosen])
        batch += 1


def _end(tokenizer: Tokenizer) -> int:
    return tokenizer.encode(END_OF_TEXT).ids[0]


def _row(tokens: list[int], learnt: list[bool]) -> Row:
    labels = [token if learn else IGNORED for token, learn in zip(tokens[1:], learnt[1:], strict=True)]
    return torch.tensor(tokens[:-1]), torch.tensor(labels)


def _encode(tokenizer: Tokenizer, item: object, end: int) -> tuple[list[int], list[bool]]:
    if isinstance(item, str):
        ids = [*tokenizer.encode(item).ids, end]
        return ids, [True] * len(ids)
    assert isinstance(item, list)
    return encode_chat(tokenizer, item)
