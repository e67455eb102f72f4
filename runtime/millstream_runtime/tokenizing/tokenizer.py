"""The tokenizer of a model folder: text and chats to token ids, and back through `detokenizer`.

Read from `tokenizer.json` by the `tokenizers` library (Rust, 50 ms to import) and not by `transformers`, which would
cost a second of every boot; tests prove that both give the same ids.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.gguf.gguf_model import GgufModel, read_gguf_folder
from millstream_runtime.gguf.special_tokens import end_tokens, ignored_ids
from millstream_runtime.gguf.tokenizer_files import tokenizer_config, tokenizer_json
from millstream_runtime.rust_panics import RustPanic, panics_as_errors, tokenizers_errors
from millstream_runtime.tokenizing.chat_template import (
    SPECIAL_TOKEN_NAMES,
    ChatPromptTooLong,
    ChatTemplate,
    ChatTemplateError,
)
from millstream_runtime.tokenizing.detokenizer import (
    ByteLevelDetokenizer,
    ByteLevelVocabulary,
    Detokenizer,
    StepwiseDecoder,
    StepwiseDetokenizer,
    is_byte_level,
)
from millstream_runtime.tokenizing.folder.choices import TextChoices
from millstream_runtime.tokenizing.folder.files import JsonFile, read_json_file
from millstream_runtime.tokenizing.folder.folder_text import (
    GENERATION,
    end_tokens_without_tokenizer,
    read_folder_tokens,
)
from millstream_runtime.tokenizing.folder.template_source import choose_template
from millstream_runtime.tokenizing.folder.token import Token
from millstream_runtime.tokenizing.text_growth import GrowthRefused, check_growth, check_tokens
from millstream_runtime.tokenizing.tokenizer_parts import AddedText, one_line, read_parts

BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # SentencePiece's spelling of a byte that no piece covers
SENTENCEPIECE_SPACE = "\u2581"
LONG_CHARACTERS = 2048  # of a text or tokens, for which the interpreter lock is released
TRIAL_TEXT = "Hello 1."  # encoded and decoded at load, so that what fails on any text fails there

# Of one text, more threads than the caller's would only take time from the engine's.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class Tokenizer:
    """Thread-safe: no method keeps state. What is long is encoded and decoded without the interpreter lock.

    The library releases it for batches only: a thread that calls `encode` or `decode` of a long text would keep the
    event loop waiting all the same, and its time limit from being noticed.
    """

    def __init__(
        self,
        content: bytes,
        chat_template: ChatTemplate | None,
        choices: TextChoices | None = None,
        added_tokens: Sequence[Token] = (),
    ) -> None:
        """`content`: of a tokenizer.json. What it can make of a text is checked before the library reads all of it.

        `added_tokens`: that other files of the folder add to it. `choices`: what was chosen from which file.

        Raises:
            TokenizerPartsError: it is not a tokenizer.
            GrowthRefused: it makes too much of too little.
            RustPanic: the library fails on it.
            Exception: the library's, for every other error.
        """
        parts = read_parts(content)
        self._normalized_length = check_growth(parts)
        self._normalized_length.probe_tokens([AddedText(token.content, token.normalized) for token in added_tokens])
        self._fast = _read(content, added_tokens)
        self._chat_template = chat_template
        self._byte_level = ByteLevelVocabulary(self._fast) if is_byte_level(parts.decoders) else None
        self._stepwise = StepwiseDecoder(self._fast, parts.decoders)
        self._longest_token_characters = max((len(token) for token in self._fast.get_vocab()), default=1)
        check_tokens(self._longest_token_characters)
        detokenizer = "stepwise" if self._byte_level is None else "byte-level"
        self.choices = replace(choices or TextChoices("tokenizer.json"), detokenizer=detokenizer)

    @staticmethod
    def from_folder(folder: Path) -> Tokenizer:
        """Read the files of a folder that say something about text (`folder/folder_text.py`), and its chat template.

        Of a folder with a GGUF file and no tokenizer.json, the vocabulary in that file.

        Raises:
            RuntimeFailure: a file is missing or broken; the message names it.
        """
        path = folder / "tokenizer.json"
        gguf = read_gguf_folder(folder) if folder.is_dir() else None
        if gguf is not None and not path.exists():
            return _from_gguf(gguf)
        config = None if gguf is None else JsonFile(gguf.path.name, gguf.config(is_header_alone=True))
        text = read_folder_tokens(folder, config)
        choice = choose_template(folder, text.settings)
        template = None
        if choice.source is not None:
            template = ChatTemplate(choice.source, text.special, str(folder / choice.file))
        choices = replace(text.choices, template=choice.file, notes=(*text.choices.notes, *choice.notes))
        problem, refusal = f"{path} is not a tokenizer", f"{path} cannot be served"
        return _checked(lambda: Tokenizer(text.content, template, choices, text.added), problem, refusal)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    @property
    def takes_parts(self) -> bool:
        """Whether the chat template reads a message's content as a list of parts."""
        return self._chat_template is not None and self._chat_template.takes_parts

    def vocabulary(self) -> dict[str, int]:
        """Ids of all tokens, added ones included."""
        return dict(self._fast.get_vocab(with_added_tokens=True))

    def least_tokens(self, characters: int) -> int:
        """A lower bound on the tokens of a text this long, at no cost: no token is longer than the longest one.

        Tokenising megabytes takes seconds and hundreds of bytes of memory a character, so a prompt that cannot fit
        the context is refused by this bound before it is tokenised. (A normaliser that shortens text could break the
        bound; those that served models use do not.)
        """
        return characters // self._longest_token_characters

    def most_characters(self, tokens: int) -> int:
        """An upper bound on the characters of a text of this many tokens."""
        return tokens * self._longest_token_characters

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a plain prompt, with the special tokens that the tokenizer puts around one (often a BOS).

        Raises:
            TextTooLong: the normalizer makes too much of it.
            RustPanic: the library fails on it.
        """
        return self._ids(text, add_special_tokens)

    @tokenizers_errors
    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids by the model's own decoder, without special tokens.

        Raises:
            RustPanic: the library fails on these ids.
        """
        if len(token_ids) < LONG_CHARACTERS:
            return str(self._fast.decode(list(token_ids), skip_special_tokens=True))
        (text,) = self._fast.decode_batch([list(token_ids)], skip_special_tokens=True)
        return str(text)

    def token_bytes(self, token_id: int) -> bytes:
        """One token's own bytes, which need not be whole characters; a special token's are its name.

        b"" for ids past the vocabulary, which a padded embedding can produce.
        """
        token = self._fast.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level is not None:
            return self._byte_level.bytes_of(token_id) or token.encode()
        byte = BYTE_FALLBACK.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace(SENTENCEPIECE_SPACE, " ").encode()

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any] = MappingProxyType({}),
        seconds: float | None = None,
        max_characters: int | None = None,
    ) -> list[int]:
        """Ids of a conversation, ready for the assistant's next turn. The template writes its own special tokens.

        `template_kwargs`: further variables of the template, as plain JSON. `seconds`: for the template, if less than
        it has. `max_characters`: of what the template makes, before the cost of tokenising it.

        Raises:
            ChatTemplateTooSlow: the template has not ended in its time.
            ChatPromptTooLong: the template made more characters.
            ChatTemplateError: the template refused the messages, or makes no text of them.
            TextTooLong, RustPanic: as for `encode`.
            ValueError: the model has no chat template.
        """
        if self._chat_template is None:
            raise ValueError("The model has no chat template.")
        prompt = self._chat_template.render(messages, template_kwargs, seconds)
        if max_characters is not None and len(prompt) > max_characters:
            raise ChatPromptTooLong(len(prompt))
        try:
            return self._ids(prompt, add_special_tokens=False)
        except TypeError as error:  # the library's for half of a surrogate pair, which a template can make
            raise ChatTemplateError("The model's chat template makes no text of these messages.") from error

    @tokenizers_errors
    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        self._normalized_length.require(text)
        if len(text) < LONG_CHARACTERS:
            return list(self._fast.encode(text, add_special_tokens=add_special_tokens).ids)
        (encoded,) = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoded.ids)

    def detokenizer(self) -> Detokenizer:
        """Fresh state for one generation."""
        return ByteLevelDetokenizer(self._byte_level) if self._byte_level else StepwiseDetokenizer(self._stepwise)


def _from_gguf(model: GgufModel) -> Tokenizer:
    metadata, where = model.header.metadata, model.header.where
    content = json.dumps(tokenizer_json(metadata, where)).encode()
    settings = tokenizer_config(metadata, where)
    source = settings.get("chat_template")
    special = {name: settings[name] for name in SPECIAL_TOKEN_NAMES if name in settings}
    template = None if source is None else ChatTemplate(source, special)
    file = model.path.name
    ends = end_tokens_without_tokenizer(
        JsonFile(file, {"eos_token_id": end_tokens(metadata)}), read_json_file(model.path.with_name(GENERATION))
    )
    choices = TextChoices(
        tokenizer=file,
        template="" if source is None else file,
        special_tokens={name: (token, file) for name, token in special.items()},
        end_tokens=sorted(ends.ids),
        end_sources=ends.sources,
        notes=(*((ends.difference,) if ends.difference else ()), *ignored_ids(metadata)),
    )
    problem = f"{where} holds no usable tokenizer"
    return _checked(lambda: Tokenizer(content, template, choices), problem, problem)


def _checked(make: Callable[[], Tokenizer], is_broken: str, is_refused: str) -> Tokenizer:
    """The tokenizer; else a failure that begins with `is_broken`, or with `is_refused` where it makes too much."""
    try:
        return make()
    except GrowthRefused as error:
        raise RuntimeFailure(FailureReason.CHECKPOINT_INVALID, f"{is_refused}: {error}.") from error
    except RustPanic as panic:
        reason = one_line(panic.detail)
        raise RuntimeFailure(FailureReason.CHECKPOINT_INVALID, f"{is_broken}: {reason}.") from panic
    except Exception as error:  # tokenizers raises bare Exception for every parse error
        raise RuntimeFailure(FailureReason.CHECKPOINT_INVALID, f"{is_broken}: {one_line(str(error))}.") from error


@panics_as_errors
def _read(content: bytes, added_tokens: Sequence[Token]) -> FastTokenizer:
    """The library's tokenizer, which has been tried once.

    Raises:
        RustPanic: it fails on any text.
    """
    fast = FastTokenizer.from_buffer(content)
    if added_tokens:
        fast.add_tokens([_library_token(token) for token in added_tokens])
    fast.no_truncation()  # the server answers an overlong prompt with an error, never with a cut one
    fast.no_padding()
    with suppress(Exception):  # a vocabulary of a few words has no token for others; a panic is no Exception
        fast.decode(fast.encode(TRIAL_TEXT).ids)
    return fast


def _library_token(token: Token) -> AddedToken:
    return AddedToken(
        token.content,
        special=token.special,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        single_word=token.single_word,
        normalized=token.normalized,
    )
