"""The tables of tokenizer classes say what `transformers` does."""

from __future__ import annotations

import inspect

import pytest
from transformers import TokenizersBackend
from transformers.models.auto.tokenization_auto import (
    MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS,
    TOKENIZER_MAPPING_NAMES,
    tokenizer_class_from_name,
)

from millstream_runtime.model_families import FAMILIES
from millstream_runtime.tokenizing.folder.tokenizer_classes import (
    CLASS_DEFAULTS,
    CLASS_OF_MODEL_TYPE,
    GENERIC,
    MODEL_TYPES_WITH_A_WRONG_CLASS,
    SPECIAL_TOKEN_NAMES,
    tokenizer_class,
)


def defaults_in_transformers(name: str) -> dict[str, str]:
    made = tokenizer_class_from_name(name) or tokenizer_class_from_name(f"{name}Fast")
    fields = inspect.signature(made.__init__).parameters
    found = {token: fields[token].default for token in SPECIAL_TOKEN_NAMES if token in fields}
    return {token: str(value) for token, value in found.items() if value not in (None, inspect.Parameter.empty)}


@pytest.mark.parametrize("name", CLASS_DEFAULTS)
def test_a_class_has_the_tokens_that_it_has_in_transformers(name: str) -> None:
    assert CLASS_DEFAULTS[name] == defaults_in_transformers(name)


def test_every_class_with_tokens_that_a_model_type_has_is_in_the_table() -> None:
    names = {name.removesuffix("Fast") for name in TOKENIZER_MAPPING_NAMES.values() if name}
    made = {name: tokenizer_class_from_name(name) for name in names}
    fast = [name for name, one in made.items() if isinstance(one, type) and issubclass(one, TokenizersBackend)]
    with_tokens = {name for name in fast if defaults_in_transformers(name)}
    assert len(with_tokens) > 40
    assert with_tokens - CLASS_DEFAULTS.keys() == set()


def test_a_model_type_has_the_class_that_it_has_in_transformers() -> None:
    families = {name for family in FAMILIES for name in (family.model_type, *family.aliases)}
    for name in families | CLASS_OF_MODEL_TYPE.keys():
        theirs = TOKENIZER_MAPPING_NAMES.get(name)
        assert CLASS_OF_MODEL_TYPE.get(name) == theirs, name
        is_wrong = theirs is not None and name in MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
        assert (name in MODEL_TYPES_WITH_A_WRONG_CLASS) == is_wrong, name


@pytest.mark.parametrize(
    ("named", "model_type", "is_byte_level", "expected"),
    [
        ("LlamaTokenizerFast", "llama", False, "LlamaTokenizer"),
        ("LlamaTokenizer", "llama", True, GENERIC),
        ("LlamaTokenizer", "mistral", False, GENERIC),
        ("PreTrainedTokenizerFast", "qwen2", True, "Qwen2Tokenizer"),
        ("PreTrainedTokenizerFast", "gemma", False, GENERIC),
        ("GPT2Tokenizer", "qwen3", True, "GPT2Tokenizer"),
        (None, "gemma3", False, "GemmaTokenizer"),
        (None, "llama", False, GENERIC),
        (None, None, False, GENERIC),
    ],
)
def test_the_class_of_a_folder(named: str | None, model_type: str | None, is_byte_level: bool, expected: str) -> None:
    found = tokenizer_class(
        {"tokenizer_class": named}, {"model_type": model_type}, settings_file="x", is_byte_level=is_byte_level
    )
    assert found == expected
    of_config = tokenizer_class(
        {}, {"model_type": model_type, "tokenizer_class": named}, settings_file="x", is_byte_level=is_byte_level
    )
    assert of_config == expected
