"""The special tokens of a folder, by the rules of `transformers`.

    tokenizer_config.json        bos_token, eos_token, …, further *_token, additional_special_tokens;
                                 model_specific_special_tokens where no further *_token is a text
    special_tokens_map.json      the same; wins, but is not read where tokenizer_config.json has added_tokens_decoder
    the tokenizer's class        what both files leave out; `null` in a file is no token

Pure: files are read elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from millstream_runtime.tokenizing.folder.files import JsonFile
from millstream_runtime.tokenizing.folder.token import Token, read_token, special_token, wrong
from millstream_runtime.tokenizing.folder.tokenizer_classes import (
    CLASS_DEFAULTS,
    OWN_TOKENS_OF_CLASS,
    SPECIAL_TOKEN_NAMES,
)

ADDED_TOKENS_FIELD = "added_tokens_decoder"
SETTINGS_NAME = "tokenizer_config.json"
SPECIFIC_FIELD = "model_specific_special_tokens"  # as transformers 5 saves tokens with the model's own names
EXTRA_FIELDS = ("extra_special_tokens", "additional_special_tokens")  # today's name and the older one


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """`named`: bos_token and the like, and those of the model's own names, in the order in which ids are given.

    `extra`: without a name. `sources`: the file, or the class, that says each named one. `is_exact`: no file's flags of
    these tokens count. `listed`: all that lists of tokens without a name hold, also one that another list replaces.
    """

    named: Mapping[str, Token]
    extra: Sequence[Token]
    sources: Mapping[str, str]
    is_exact: bool = False
    listed: frozenset[str] = frozenset()

    def exact(self) -> SpecialTokens:
        """The same without flags."""
        named = {name: special_token(token.content) for name, token in self.named.items()}
        extra = tuple(special_token(token.content) for token in self.extra)
        return SpecialTokens(named, extra, self.sources, is_exact=True, listed=self.listed)

    def flagged(self, token: Token) -> Token:
        """A token of a file, with the flags that it has if it is one of these."""
        if token.content in {named.content for named in self.named.values()}:
            return special_token(token.content) if self.is_exact else replace(token, special=True)
        is_extra = self.is_exact and token.content in {extra.content for extra in self.extra}
        return special_token(token.content) if is_extra else token

    def content(self, name: str) -> str | None:
        """The text of a named token; None: the folder has none."""
        token = self.named.get(name)
        return None if token is None else token.content

    def is_of_class(self, name: str) -> bool:
        """Whether no file says the token, and the tokenizer's class has it by itself."""
        return self.sources.get(name) in CLASS_DEFAULTS


def reads_map(settings: Mapping[str, Any]) -> bool:
    """Whether special_tokens_map.json and added_tokens.json count."""
    return settings.get(ADDED_TOKENS_FIELD) is None


def decide_special_tokens(settings: JsonFile, map_file: JsonFile | None, class_name: str) -> SpecialTokens:
    """Decide. `map_file`: special_tokens_map.json, where it counts.

    Raises:
        RuntimeFailure: CheckpointInvalid, a token is neither a text nor an object; the message names file and field.
    """
    own, extra = _split_extra(settings)
    named: dict[str, Token | None] = {}
    sources: dict[str, str] = {}
    for file in (settings, map_file):
        for name, value in (file.values if file is not None else {}).items():
            if _is_named(name, value) and file is not None:
                named[name] = None if value is None else read_token(value, file.name, name, special=True)
                sources[name] = file.name
    if map_file is not None:
        more_own, extra = _merge_extra(map_file, extra)
        own |= more_own
    for name, own_token in own.items():
        named[name], sources[name] = own_token, settings.name if name in _own_names(settings) else _name(map_file)
    of_class = OWN_TOKENS_OF_CLASS.get(class_name, {})
    own_defaults = {name: token for name, token in of_class.items() if name not in settings.values or name in named}
    if extra is None:  # the class adds its defaults even where the folder has other tokens with these names
        extra = [special_token(content) for content in own_defaults.values()]
    for name, content in {**CLASS_DEFAULTS.get(class_name, {}), **own_defaults}.items():
        if name not in named:
            named[name], sources[name] = special_token(content), class_name
    first = (*SPECIAL_TOKEN_NAMES, *of_class)
    order = (*first, *(name for name in named if name not in first))
    present = {name: present_token for name in order if (present_token := named.get(name)) is not None}
    of_present = {name: sources[name] for name in present}
    return SpecialTokens(present, tuple(extra or ()), of_present, listed=_contents_of_lists(settings, map_file))


def _is_named(name: str, value: object) -> bool:
    """Whether a field is a special token: one of those that each class has, or one of the model's own name."""
    if name in SPECIAL_TOKEN_NAMES:
        return True
    is_token = isinstance(value, str) or (isinstance(value, Mapping) and "content" in value)
    return name.endswith("_token") and is_token


def _split_extra(settings: JsonFile) -> tuple[dict[str, Token], list[Token] | None]:
    """Tokens with the model's own names, and those without a name; the newer field wins where it is not empty."""
    newer, older = (settings.values.get(field) for field in EXTRA_FIELDS)
    own = _own_tokens(_own_names(settings), settings)
    if newer and not isinstance(newer, Mapping):
        return own, _listed(newer, settings, EXTRA_FIELDS[0])
    return own, _listed(older, settings, EXTRA_FIELDS[1])


def _merge_extra(map_file: JsonFile, extra: list[Token] | None) -> tuple[dict[str, Token], list[Token] | None]:
    """The same, with what special_tokens_map.json adds."""
    newer, older = (map_file.values.get(field) for field in EXTRA_FIELDS)
    own = _own_tokens(newer, map_file) if isinstance(newer, Mapping) else {}
    listed = None if isinstance(newer, Mapping) else _listed(newer, map_file, EXTRA_FIELDS[0])
    if listed is not None:
        known = {token.content for token in extra or ()}
        extra = [*(extra or ()), *(token for token in listed if token.content not in known)]
    return own, _listed(older, map_file, EXTRA_FIELDS[1]) if extra is None else extra


def _own_tokens(values: Mapping[str, Any], file: JsonFile) -> dict[str, Token]:
    field = EXTRA_FIELDS[0]
    return {name: read_token(value, file.name, f"{field}.{name}", special=True) for name, value in values.items()}


def _listed(values: object, file: JsonFile, field: str) -> list[Token] | None:
    if values is None:
        return None
    if not isinstance(values, list):
        raise wrong(file.name, field, values, "a list of tokens")
    # An object of tokenizer_config.json is special where it says so: transformers 5 reads it like that, too.
    is_map = file.name != SETTINGS_NAME
    return [
        read_token(value, file.name, f"{field}[{place}]", special=is_map or isinstance(value, str))
        for place, value in enumerate(values)
    ]


def _contents_of_lists(*files: JsonFile | None) -> frozenset[str]:
    """What is no text in these lists is left out: a list that counts has been checked."""
    lists = [file.values.get(field) for file in files if file is not None for field in EXTRA_FIELDS]
    values = [value for one_list in lists if isinstance(one_list, list) for value in one_list]
    contents = (value.get("content") if isinstance(value, Mapping) else value for value in values)
    return frozenset(content for content in contents if isinstance(content, str))


def _own_names(settings: JsonFile) -> Mapping[str, Any]:
    """Tokens with the model's own names that do not stand as fields themselves; where some do, the newer field is none.

    Raises:
        RuntimeFailure: CheckpointInvalid, the newer field is no object.
    """
    values = settings.values.get(EXTRA_FIELDS[0])
    newer = settings.values.get(SPECIFIC_FIELD)
    if newer is not None and not isinstance(newer, Mapping):
        raise wrong(settings.name, SPECIFIC_FIELD, newer, 'an object such as {"image_token": "<image>"}')
    has_own_fields = any(
        name not in SPECIAL_TOKEN_NAMES and name.endswith("_token") and isinstance(value, str)
        for name, value in settings.values.items()
    )
    if isinstance(values, Mapping) and (values or has_own_fields or not newer):
        return values
    return {} if has_own_fields or newer is None else newer


def _name(file: JsonFile | None) -> str:
    return "" if file is None else file.name
