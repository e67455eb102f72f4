"""Decide from a whole folder: the one place where tokenizer, special and added tokens and ends are chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream_runtime.tokenizing.folder.added_tokens import AddedTokens, decide_added_tokens
from millstream_runtime.tokenizing.folder.choices import TextChoices, named_tokens
from millstream_runtime.tokenizing.folder.class_pipelines import (
    Pipeline,
    different_parts,
    pipeline_of,
    rebuilt_tokenizer,
)
from millstream_runtime.tokenizing.folder.files import (
    TOKENIZER_LIMIT_BYTES,
    JsonFile,
    invalid,
    read_bytes,
    read_json_file,
)
from millstream_runtime.tokenizing.folder.special_tokens import (
    ADDED_TOKENS_FIELD,
    SpecialTokens,
    decide_special_tokens,
    reads_map,
)
from millstream_runtime.tokenizing.folder.stops import EndTokens, decide_end_tokens
from millstream_runtime.tokenizing.folder.token import Token
from millstream_runtime.tokenizing.folder.tokenizer_classes import CLASS_DEFAULTS, GENERIC, tokenizer_class
from millstream_runtime.tokenizing.folder.vocabulary_file import FILE_NAME, VocabularyFile, parse_vocabulary

SETTINGS, SPECIAL_TOKENS_MAP, ADDED_TOKENS = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
CONFIG, GENERATION = "config.json", "generation_config.json"
# Fields of tokenizer_config.json that are not applied, and what that means where they are true.
OTHER_TEXT = {
    "split_special_tokens": "a special token in a prompt stays whole",
    "fix_mistral_regex": f"{FILE_NAME} says how words are cut",
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": "spaces before punctuation stay",
}
NO_TOKENIZER = "save the tokenizer with `tokenizer.save_pretrained(...)` of its fast version"


@dataclass(frozen=True, slots=True)
class FolderTokens:
    """`content`: a tokenizer.json, the folder's or the one that its class makes of it.

    `added`: tokens to add to it. `special`: that a template may name.
    """

    content: bytes
    settings: Mapping[str, Any]
    added: Sequence[Token]
    special: Mapping[str, str]
    choices: TextChoices


def read_folder_tokens(folder: Path, gguf_config: JsonFile | None = None) -> FolderTokens:
    """Read what a folder with a tokenizer.json says. `gguf_config`: of a GGUF file that has the weights.

    Raises:
        RuntimeFailure: CheckpointInvalid, a file is missing or wrong; the message names it.
    """
    files = _Files.read(folder)
    if files is None:
        raise invalid(f"{folder / FILE_NAME} is missing; {NO_TOKENIZER}.")
    config = gguf_config or read_json_file(folder / CONFIG) or JsonFile(CONFIG, {})
    special, added, ends = files.decide(config, read_json_file(folder / GENERATION))
    return FolderTokens(
        files.tokenizer_of_class(config, special, added),
        files.settings.values,
        added.tokens,
        {name: token.content for name, token in special.named.items()},
        _choices(files, special, added, ends, config),
    )


def end_token_ids(config_path: Path, config_values: Mapping[str, Any]) -> frozenset[int]:
    """Ids that end an answer of a model.

    Args:
        config_path: of config.json, or of the GGUF file, next to which the other files lie.
        config_values: its fields.

    Raises:
        RuntimeFailure: CheckpointInvalid, a file is wrong; the message names it.
    """
    folder, config = config_path.parent, JsonFile(str(config_path), config_values)
    if config_path.name == CONFIG:  # as a whole: of a model with a vision tower, the fields are those of its decoder
        config = JsonFile(str(config_path), (read_json_file(config_path) or config).values)
    generation = read_json_file(folder / GENERATION)
    files = _Files.read(folder)
    if files is not None:
        return files.decide(config, generation)[2].ids
    return end_tokens_without_tokenizer(config, generation).ids


def end_tokens_without_tokenizer(config: JsonFile, generation: JsonFile | None) -> EndTokens:
    """Of a folder whose tokenizer is in its GGUF file, or that has none."""
    return decide_end_tokens(
        config, generation, None, vocab_size=_vocab_size(config.values), is_plain_text=lambda _number: False
    )


@dataclass(frozen=True, slots=True)
class _Files:
    """The parsed files of the tokenizer."""

    content: bytes
    vocabulary: VocabularyFile
    settings: JsonFile
    map_file: JsonFile | None
    added_file: JsonFile | None

    @staticmethod
    def read(folder: Path) -> _Files | None:
        """None where there is no tokenizer.json."""
        content = read_bytes(folder / FILE_NAME, TOKENIZER_LIMIT_BYTES)
        if content is None:
            return None
        settings = read_json_file(folder / SETTINGS) or JsonFile(SETTINGS, {})
        reads_more = reads_map(settings.values)
        return _Files(
            content,
            parse_vocabulary(folder / FILE_NAME, content),
            settings,
            read_json_file(folder / SPECIAL_TOKENS_MAP) if reads_more else None,
            read_json_file(folder / ADDED_TOKENS) if reads_more else None,
        )

    def class_name(self, config: JsonFile) -> str:
        byte_level = self.vocabulary.is_byte_level
        return tokenizer_class(self.settings.values, config.values, settings_file=SETTINGS, is_byte_level=byte_level)

    def pipeline(self, config: JsonFile, special: SpecialTokens) -> Pipeline | None:
        """The pipeline that the tokenizer's class builds; None: the one of tokenizer.json counts."""
        if not self.vocabulary.is_bpe:
            return None
        return pipeline_of(self.class_name(config), self.settings, special.content("unk_token"))

    def tokenizer_of_class(self, config: JsonFile, special: SpecialTokens, added: AddedTokens) -> bytes:
        """A tokenizer.json: the folder's, or the one that the tokenizer's class makes of it."""
        pipeline = self.pipeline(config, special)
        if pipeline is None:
            return self.content
        bos = special.content("bos_token")
        number = None if bos is None else added.ids.get(bos, self.vocabulary.ids.get(bos))
        return rebuilt_tokenizer(self.content, pipeline, None if bos is None or number is None else (bos, number))

    def decide(self, config: JsonFile, generation: JsonFile | None) -> tuple[SpecialTokens, AddedTokens, EndTokens]:
        special = decide_special_tokens(self.settings, self.map_file, self.class_name(config))
        vocab_size = _vocab_size(config.values)
        vocabulary, pipeline = self.vocabulary, self.pipeline(config, special)
        if pipeline is not None:  # the class adds the tokens of tokenizer.json anew
            vocabulary = vocabulary.with_class()
            special = special.exact() if pipeline.has_exact_special_tokens else special
        added = decide_added_tokens(self.settings, self.added_file, special, vocabulary, vocab_size)
        special_ids = {*added.ids.values(), *vocabulary.added}

        def is_plain_text(number: int) -> bool:
            return number not in special_ids and number in set(self.vocabulary.ids.values())

        ends = decide_end_tokens(
            config,
            generation,
            _tokenizer_end(special, added, vocabulary),
            vocab_size=vocab_size,
            is_plain_text=is_plain_text,
        )
        return special, added, ends


def _tokenizer_end(special: SpecialTokens, added: AddedTokens, vocabulary: VocabularyFile) -> tuple[str, int] | None:
    """The tokenizer's EOS; None where it has none, or its class has one that no file knows."""
    content = special.content("eos_token")
    if content is None:
        return None
    number = vocabulary.id_of(content)
    if number is None and (vocabulary.names(content) or not special.is_of_class("eos_token")):
        number = added.ids.get(content)
    return None if number is None else (special.sources["eos_token"], number)


def _choices(
    files: _Files, special: SpecialTokens, added: AddedTokens, ends: EndTokens, config: JsonFile
) -> TextChoices:
    pipeline = files.pipeline(config, special)
    counts = {FILE_NAME: len(files.vocabulary.added)} if files.vocabulary.added else {}
    if pipeline is not None and files.settings.values.get(ADDED_TOKENS_FIELD) is not None:
        counts = {}  # the class adds those of tokenizer_config.json alone
    return TextChoices(
        tokenizer=FILE_NAME,
        tokenizer_class=files.class_name(config),
        pipeline=FILE_NAME if pipeline is None else files.class_name(config),
        special_tokens={name: (token.content, special.sources[name]) for name, token in special.named.items()},
        added_tokens=counts | dict(added.sources),
        end_tokens=sorted(ends.ids),
        end_sources=ends.sources,
        notes=(*_class_notes(files, files.class_name(config), pipeline), *_notes(files, added, ends)),
    )


def _notes(files: _Files, added: AddedTokens, ends: EndTokens) -> list[str]:
    notes = [ends.difference] if ends.difference else []
    notes += _not_applied(files.settings.values, is_bpe=files.vocabulary.is_bpe)
    for file in (files.settings, files.map_file, files.added_file):
        if file is not None and file.repeated:
            notes.append(f"{file.name} gives {named_tokens(file.repeated)} twice: the last value counts.")
    if added.beyond:
        notes.append(
            f"The model's vocabulary ends before the added tokens {named_tokens(added.beyond)}: they are left out, "
            "and a prompt has them in pieces."
        )
    if added.moved:
        moved = [f"{token:.40} has the id {number} and not {stated}" for token, stated, number in added.moved]
        notes.append(f"Other ids than a file says, as in transformers: {named_tokens(moved)}.")
    return notes


def _class_notes(files: _Files, class_name: str, pipeline: Pipeline | None) -> list[str]:
    """Where the tokenizer's class and tokenizer.json say different things about text."""
    if pipeline is not None:
        parts = different_parts(files.content, pipeline)
        if not parts:
            return []
        return [
            f"The tokenizer's class {class_name} decides {named_tokens(parts)}, as in transformers 5, and not "
            f"{FILE_NAME}, which says something else. With tokenizer_class: {GENERIC} in {SETTINGS}, it would decide."
        ]
    if class_name in CLASS_DEFAULTS:
        return [
            f"transformers 5 builds a tokenizer of the class {class_name} anew; here {FILE_NAME} alone says how text "
            "is cut and joined."
        ]
    return []


def _not_applied(settings: Mapping[str, Any], *, is_bpe: bool) -> list[str]:
    """Fields by which transformers would make other tokens of a text, or another text of tokens."""
    effects = dict(OTHER_TEXT)
    if not is_bpe:
        effects["clean_up_tokenization_spaces"] = "spaces before punctuation stay in an answer"
    notes = [
        f"{SETTINGS} sets {name}, which is not applied: {effect}."
        for name, effect in effects.items()
        if settings.get(name) is True
    ]
    names = settings.get("fast_tokenizer_files")
    if isinstance(names, list) and any(name != FILE_NAME for name in names):
        notes.append(
            f"{SETTINGS} names other files in fast_tokenizer_files ({named_tokens([str(name) for name in names])}): "
            f"{FILE_NAME} is read."
        )
    return notes


def _vocab_size(values: Mapping[str, Any]) -> int | None:
    """Of the model, or of the language model within it."""
    text = values.get("text_config")
    for fields in (values, text if isinstance(text, Mapping) else {}):
        size = fields.get("vocab_size")
        if isinstance(size, int) and not isinstance(size, bool) and size > 0:
            return size
    return None
