"""The documents of a tuning: which are trained on, which decide when to stop, and which judge the result.

    --data, --general ─► each once, shuffled ─┬─► judged: of these come the figures before and after
                                              ├─► watched: they decide which step of the training is the best
                                              └─► trained on

No document is in two parts, so the figures are of prompts that neither the weights nor the choice of a step follow
from. All choices are seeded.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from millstream_runtime.errors import InvalidConfigError
from millstream_runtime.quality.documents import Document, TokenizedDocument, content_of, read_documents, tokenize
from millstream_runtime.quality.held_out_part import Tokenize, held_out_of, shuffled_once
from millstream_runtime.quality.verdict import MIN_DOCUMENTS, MIN_TOKENS, check_enough
from millstream_runtime.tokenizing.tokenizer import Tokenizer
from millstream_runtime.tune_draft.settings import TuneSettings

MAX_DOCUMENT_TOKENS = 1 << 20
WATCHED_DOCUMENTS = 12  # of each slice; a quarter of them where it has few
MIN_TRAINING_DOCUMENTS = 20
PIECES = 4  # of one long text
LEAST_PROMPT_TOKENS = 8  # of a text that the target goes on with


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the target answers. `text_ids`: the document's own continuation; may be empty.

    `text_first`: the first position of prompt and text together that the draft may have to propose.
    """

    slice: str
    is_general: bool
    prompt_ids: list[int]
    text_ids: list[int]
    text_first: int
    is_cut: bool = False  # only its end is kept


@dataclass(frozen=True, slots=True)
class TuningPrompts:
    """Of the three parts, and how many lines repeat another one."""

    training: list[Prompt]
    watched: list[Prompt]
    judged: list[Prompt]
    num_duplicates: int
    num_cut: int  # prompts to train on of which only the end is kept


@dataclass(frozen=True, slots=True)
class _Parts:
    training: list[Document]
    watched: list[Document]
    judged: list[Document]
    num_duplicates: int
    num_elsewhere: int  # documents that another file has, too


def read_prompts(
    settings: TuneSettings, tokenizers: Sequence[Tokenizer], eos_token_ids: frozenset[int], sequence_tokens: int
) -> TuningPrompts:
    """Read and split the files.

    Args:
        tokenizers: of target and draft, which must give the same tokens.
        sequence_tokens: that a prompt and its answer may have.

    Raises:
        InvalidConfigError: a line is no document (with its number), there is too little data (with the minimum), or
            the tokenizers differ.
    """
    reader = _Reader(tokenizers, eos_token_ids)
    make = partial(_prompts, tokenized=reader.tokenized, settings=settings, most=sequence_tokens)
    held_out = reader.read(settings.held_out, "--held-out")
    if held_out:
        check_enough([reader.tokenized(one) for one in held_out])
    files = [("--data", settings.data, reader.read(settings.data, "--data"))]
    own = {one.slice for one in files[0][2]}
    _check_slices(settings, own, held_out)
    if settings.general is not None:
        files.append(("--general", settings.general, reader.read(settings.general, "--general")))
    prompts = TuningPrompts([], [], [], 0, 0)
    seen = {asked_of(one) for one in held_out}  # in a file before: trained on nowhere else
    for flag, path, documents in files:
        parts = _split(documents, settings.seed, seen, None if held_out else reader.tokenized)
        _check_size(path, flag, parts, judges_itself=not held_out)
        seen |= {asked_of(one) for one in (*parts.training, *parts.watched, *parts.judged)}
        general_of = None if flag == "--data" else _apart_from(own | {one.slice for one in prompts.judged})
        prompts = _joined(prompts, parts, partial(make, general_of=general_of), settings.max_documents)
    judged = [one for document in held_out for one in make(document, general_of=None if document.slice in own else str)]
    return replace(prompts, judged=prompts.judged + judged)


class _Reader:
    """Reads files of documents that target and draft must read alike."""

    def __init__(self, tokenizers: Sequence[Tokenizer], eos_token_ids: frozenset[int]) -> None:
        self._tokenizers, self._eos_token_ids = tokenizers, eos_token_ids

    def tokenized(self, document: Document) -> TokenizedDocument:
        return tokenize([document], self._tokenizers[0], self._eos_token_ids, MAX_DOCUMENT_TOKENS)[0]

    def read(self, path: Path | None, flag: str) -> list[Document]:
        """Return the documents; none where there is no file. Raises InvalidConfigError: see `read_prompts`."""
        if path is None:
            return []
        documents = read_documents(path, flag=flag)
        ours, theirs = (tokenize(documents, one, self._eos_token_ids, MAX_DOCUMENT_TOKENS) for one in self._tokenizers)
        for one, other in zip(ours, theirs, strict=True):
            if one.token_ids != other.token_ids:
                raise InvalidConfigError(
                    f"Line {one.line} of {path} becomes other tokens in the draft than in the target: their tokenizers "
                    "or chat templates differ, so the draft's tokens cannot stand."
                )
        return documents


def asked_of(document: Document) -> str:
    """Return what the target is asked: two lines that ask the same are one, whatever their answers."""
    if document.messages or document.prompt:
        return json.dumps([document.messages, document.prompt])
    return content_of(document)


def _apart_from(own: set[str]) -> Callable[[str], str]:
    """Return what names a slice of other work. If it had the name of one of --data, gains there would hide losses."""
    return lambda name: f"{name} (general)" if name in own else name


def _check_slices(settings: TuneSettings, own: set[str], held_out: Sequence[Document]) -> None:
    """Raises InvalidConfigError: no held-out document says whether the draft is better at the work of --data."""
    slices = {one.slice for one in held_out}
    if slices and slices.isdisjoint(own):
        raise InvalidConfigError(
            f"--held-out {settings.held_out} has no document of a slice of --data: its slices are {_names(slices)}, "
            f"and those of --data are {_names(own)}. Name them alike."
        )


def _names(slices: set[str]) -> str:
    found = sorted(slices)
    return ", ".join(found[:4]) + (", …" if len(found) > 4 else "")


def _joined(
    prompts: TuningPrompts, parts: _Parts, make: Callable[..., Iterator[Prompt]], max_documents: int
) -> TuningPrompts:
    """With the prompts of a file's parts behind them."""
    training = [one for document in parts.training[:max_documents] for one in make(document, pieces=PIECES)]
    watched, judged = ([one for document in part for one in make(document)] for part in (parts.watched, parts.judged))
    return TuningPrompts(
        prompts.training + training,
        prompts.watched + watched,
        prompts.judged + judged,
        prompts.num_duplicates + parts.num_duplicates,
        prompts.num_cut + sum(one.is_cut for one in training),
    )


def _split(documents: Sequence[Document], seed: int, seen: set[str], judge: Tokenize | None) -> _Parts:
    """Without documents that were `seen`. `judge`: holds a part out to judge by, with this tokenizer."""
    once = shuffled_once(documents, seed, asked_of)
    unique = [one for one in once if asked_of(one) not in seen]
    judged = [] if judge is None else held_out_of(unique, judge)
    lines = {one.line for one in judged}
    rest = [one for one in unique if one.line not in lines]
    watched: list[Document] = []
    for name, count in Counter(one.slice for one in rest).items():
        of_slice = [one for one in rest if one.slice == name]
        watched += of_slice[: min(WATCHED_DOCUMENTS, count // 4)]
    lines = {one.line for one in watched}
    training = [one for one in rest if one.line not in lines]
    return _Parts(training, watched, judged, len(documents) - len(unique), len(once) - len(unique))


def _check_size(path: Path, flag: str, parts: _Parts, *, judges_itself: bool) -> None:
    too_little = len(parts.training) < MIN_TRAINING_DOCUMENTS or not parts.watched
    if too_little or (judges_itself and not parts.judged):
        different = len(parts.training) + len(parts.watched) + len(parts.judged)
        held = f", {MIN_DOCUMENTS} to judge by with {MIN_TOKENS} tokens in their answers" if judges_itself else ""
        other = f" and {parts.num_elsewhere} more that --held-out or --data has, too" if parts.num_elsewhere else ""
        raise InvalidConfigError(
            f"{flag} {path} has {different} different documents{other}, of which {len(parts.training)} are left to "
            f"train on. The least is {MIN_TRAINING_DOCUMENTS} documents to train on{held}, and a few to choose the "
            "best step by. Add documents."
        )


def _prompts(
    document: Document,
    *,
    tokenized: Tokenize,
    settings: TuneSettings,
    most: int,
    general_of: Callable[[str], str] | None,
    pieces: int = 1,
) -> Iterator[Prompt]:
    """One of a chat or a completion; of a text as many as it has pieces, each cut in two at a seeded place.

    `general_of`: names the slices of other work; None: the document is of the user's own.
    """
    is_general, name = general_of is not None, general_of(document.slice) if general_of else document.slice
    found = tokenized(document)
    ids, first, longest = found.token_ids, found.num_prompt_tokens, most - settings.answer_tokens
    if document.messages or document.prompt:
        prompt = ids[:first][-longest:]
        text = ids[first:][: most - len(prompt)]
        yield Prompt(name, is_general, prompt, text, len(prompt), first > longest)
        return
    choose = random.Random(f"{settings.seed} {document.line}")  # noqa: S311 - reproducible, not secret
    for start in range(0, max(1, min(pieces * most, len(ids)) - LEAST_PROMPT_TOKENS), most):
        piece = ids[start : start + most]
        latest = max(1, min(len(piece) // 2, longest))
        cut = choose.randint(min(LEAST_PROMPT_TOKENS, latest), latest)
        yield Prompt(name, is_general, piece[:cut], piece[cut:], 1)
