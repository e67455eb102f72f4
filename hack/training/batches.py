"""Rows of token ids and labels, all of one length, so that every step costs the same."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tokenizers import Tokenizer

from hack.training.conversations import Conversations
from hack.training.tokenizer import END_OF_TEXT, encode_chat

IGNORED = -100  # the label that cross-entropy skips


def batches(
    conversations: Conversations, tokenizer: Tokenizer, rows: int, row_tokens: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless pairs of ids and labels, int64 of shape (rows, row_tokens); a label is the token after its id.

    A row starts where a conversation starts, since that is where the first question of a user stands.
    """
    end = tokenizer.encode(END_OF_TEXT).ids[0]
    stream = iter(conversations)
    while True:
        ids = torch.full((rows, row_tokens), end)
        labels = torch.full((rows, row_tokens), IGNORED)
        for row in range(rows):
            tokens, learnt = _encode(tokenizer, next(stream), end)
            tokens, learnt = tokens[: row_tokens + 1], learnt[: row_tokens + 1]
            ids[row, : len(tokens) - 1] = torch.tensor(tokens[:-1])
            targets = [token if learn else IGNORED for token, learn in zip(tokens, learnt, strict=True)]
            labels[row, : len(tokens) - 1] = torch.tensor(targets[1:])
        yield ids, labels


def _encode(tokenizer: Tokenizer, item: object, end: int) -> tuple[list[int], list[bool]]:
    if isinstance(item, str):
        ids = [*tokenizer.encode(item).ids, end]
        return ids, [True] * len(ids)
    assert isinstance(item, list)
    return encode_chat(tokenizer, item)
