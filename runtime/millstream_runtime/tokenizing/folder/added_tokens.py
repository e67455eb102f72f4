"""Tokens that a folder adds to tokenizer.json's own, by the rules of `transformers`.

    tokenizer_config.json    added_tokens_decoder: {id: token}; then neither of the two below is read
    added_tokens.json        {token: id}
    tokenizer.json           added_tokens, which stand in the tokenizer already
    special tokens           those that none of these has

The library gives the ids: that of the vocabulary, else the next free one, in the order of the ids that the files say.
Pure: files are read elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from millstream_runtime.tokenizing.folder.files import JsonFile, invalid
from millstream_runtime.tokenizing.folder.special_tokens import ADDED_TOKENS_FIELD, SpecialTokens
from millstream_runtime.tokenizing.folder.token import Token, read_token, special_token, wrong
from millstream_runtime.tokenizing.folder.vocabulary_file import VocabularyFile

MAX_ADDED_TOKENS = 1 << 16
MAX_DIGITS = 9  # of an id


@dataclass(frozen=True, slots=True)
class AddedTokens:
    """`tokens`: to be added to the tokenizer, in this order. `ids`: that they then have.

    `beyond`: left out, as their ids are beyond the model's vocabulary. `moved`: tokens with another id than the file
    says, as `(token, id of the file, id)`. `sources`: file → how many tokens it says.
    """

    tokens: Sequence[Token]
    ids: Mapping[str, int]
    beyond: Sequence[str]
    moved: Sequence[tuple[str, int, int]]
    sources: Mapping[str, int]


def decide_added_tokens(
    settings: JsonFile,
    added_file: JsonFile | None,
    special: SpecialTokens,
    vocabulary: VocabularyFile,
    vocab_size: int | None,
) -> AddedTokens:
    """Decide. `added_file`: added_tokens.json, where it counts. `vocab_size`: of the model; None: unknown.

    Raises:
        RuntimeFailure: CheckpointInvalid, a file is wrong; the message names file and field.
    """
    source, stated = _stated(settings, added_file, special, vocabulary)
    tokens = [special.flagged(token) for _, token in sorted(stated.items())]
    known = {token.content for token in (*tokens, *vocabulary.added.values())}
    for token in (*special.named.values(), *special.extra):
        if token.content not in known:
            known.add(token.content)
            tokens.append(special.flagged(token))
    tokens = [token for token in tokens if token.content]
    if len(tokens) > MAX_ADDED_TOKENS:
        raise invalid(f"{source} adds {len(tokens)} tokens to {settings.name}; at most {MAX_ADDED_TOKENS} may be.")
    ids = vocabulary.ids_after(tokens)
    beyond = [token.content for token in tokens if vocab_size is not None and ids[token.content] >= vocab_size]
    # Tokens of tokenizer.json itself stay, whatever their ids.
    beyond = [content for content in beyond if not vocabulary.names(content)]
    kept = [token for token in tokens if token.content not in set(beyond)]
    moved = [
        (token.content, number, ids[token.content])
        for number, token in sorted(stated.items())
        if token.content in ids and token.content not in beyond and ids[token.content] != number
    ]
    of_file = vocabulary.added or vocabulary.added_by_class
    counts = {source: len(stated.keys() - of_file.keys())} if source else {}
    return AddedTokens(kept, {token.content: ids[token.content] for token in kept}, beyond, moved, counts)


def _stated(
    settings: JsonFile, added_file: JsonFile | None, special: SpecialTokens, vocabulary: VocabularyFile
) -> tuple[str, dict[int, Token]]:
    """The file that counts, and its tokens by the ids that it says."""
    decoder = settings.values.get(ADDED_TOKENS_FIELD)
    if decoder is not None:
        return settings.name, _decoder(decoder, settings.name)
    older: dict[int, Token] = {}
    if added_file is not None:
        # transformers 5.23 forgets additional_special_tokens of the map here, and shows them: folders that have both
        # files are of version 4, which did not.
        contents = special.listed | {token.content for token in (*_said(special), *special.extra)}
        for content, number in added_file.values.items():
            if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 10**MAX_DIGITS:
                raise wrong(added_file.name, content[:80], number, "the token's id")
            is_special = content in contents
            older[number] = special_token(content) if is_special else read_token(content, added_file.name, content[:80])
    return "" if added_file is None else added_file.name, older | dict(vocabulary.added or vocabulary.added_by_class)


def _said(special: SpecialTokens) -> Sequence[Token]:
    """The named tokens that a file says: the class's own do not make a token of added_tokens.json special."""
    return [token for name, token in special.named.items() if not special.is_of_class(name)]


def _decoder(decoder: object, file: str) -> dict[int, Token]:
    if not isinstance(decoder, Mapping):
        raise wrong(file, ADDED_TOKENS_FIELD, decoder, 'an object such as {"32000": {"content": "<pad>"}}')
    stated: dict[int, Token] = {}
    for number, value in decoder.items():
        field = f"{ADDED_TOKENS_FIELD}.{number:.20}"
        if not (number.isascii() and number.isdigit() and len(number) <= MAX_DIGITS):
            raise invalid(f"{file}: {ADDED_TOKENS_FIELD} has the key {number!r:.40}; it must be a token's id.")
        if not isinstance(value, Mapping):
            raise wrong(file, field, value, 'an object with a text in "content"')
        stated[int(number)] = read_token(value, file, field)
    return stated
