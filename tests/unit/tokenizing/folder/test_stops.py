"""An answer ends where generation_config.json, config.json or the tokenizer says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, LlamaConfig

from millstream_runtime.errors import RuntimeFailure
from millstream_runtime.models.registry import load_model_config
from millstream_runtime.tokenizing.tokenizer import Tokenizer
from tests.support.text_folders import MARKERS, NAMED, settings, text_folder

CONFIG, SETTINGS, GENERATION = "config.json", "tokenizer_config.json", "generation_config.json"
START, END = 257, 258  # <|im_start|>, <|im_end|>


def folder_of(path: Path, config: object, generation: object = None, **files: Any) -> Path:
    """`config`, `generation`: their eos_token_id; None: config.json has none, or there is no such file."""
    made = text_folder(path, {SETTINGS: settings(**NAMED)} | files)
    values = json.loads((made / CONFIG).read_text()) | {"eos_token_id": config}
    (made / CONFIG).write_text(json.dumps({name: value for name, value in values.items() if value is not None}))
    if generation is not None:
        (made / GENERATION).write_text(json.dumps({"eos_token_id": generation}))
    return made


@pytest.mark.parametrize(
    ("config", "generation"),
    [(256, None), (None, None), (END, 256), (END, None), (END, [256, START]), ([START], [256]), (256, [])],
)
def test_an_answer_ends_at_all_ends_of_the_files_and_of_the_tokenizer(
    tmp_path: Path, config: Any, generation: Any
) -> None:
    folder = folder_of(tmp_path / "m", config, generation)
    vllm = {*ids(generation), AutoTokenizer.from_pretrained(folder).eos_token_id}
    expected = vllm | {*ids(config)}
    assert load_model_config(folder).eos_token_ids == expected
    assert Tokenizer.from_folder(folder).choices.end_tokens == sorted(expected)


def ids(value: Any) -> list[int]:
    return value if isinstance(value, list) else [] if value is None else [value]


def test_one_line_says_where_the_files_differ(tmp_path: Path) -> None:
    (note,) = Tokenizer.from_folder(folder_of(tmp_path / "m", END, 256)).choices.notes
    assert note == (
        "generation_config.json says 256; config.json says 258; tokenizer_config.json says 258: "
        "an answer ends at 256, 258."
    )
    assert Tokenizer.from_folder(folder_of(tmp_path / "same", END, [END])).choices.notes == ()


def test_the_default_of_a_models_class_is_no_end(tmp_path: Path) -> None:
    assert LlamaConfig().eos_token_id == 2
    assert load_model_config(folder_of(tmp_path / "m", None, None)).eos_token_ids == {END}
    without = folder_of(tmp_path / "without", None, None, **{SETTINGS: settings()})
    assert load_model_config(without).eos_token_ids == frozenset()


def test_an_end_of_config_json_that_is_ordinary_text_is_none_where_another_file_names_ends(tmp_path: Path) -> None:
    """Fine-tunes of Llama 3 with LlamaConfig's 2 in config.json, where `#` is."""
    folder = folder_of(tmp_path / "m", 2, 256)
    assert load_model_config(folder).eos_token_ids == {256, END}
    (note,) = Tokenizer.from_folder(folder).choices.notes
    assert "2 is left out: it is ordinary text" in note
    assert load_model_config(folder_of(tmp_path / "alone", 2)).eos_token_ids == {2, END}


@pytest.mark.parametrize("number", [-1, 272, 2**40])
def test_an_id_that_the_model_has_not_is_left_out_and_named(tmp_path: Path, number: int) -> None:
    folder = folder_of(tmp_path / "m", [END, number], number)
    assert load_model_config(folder).eos_token_ids == {END}
    (note,) = Tokenizer.from_folder(folder).choices.notes
    assert f"{number} is left out: the model has no such token" in note


def test_the_tokenizers_end_may_be_a_token_that_a_file_adds(tmp_path: Path) -> None:
    more = settings(eos_token=MARKERS[1], additional_special_tokens=MARKERS)
    folder = folder_of(tmp_path / "m", None, None, **{SETTINGS: more})
    assert load_model_config(folder).eos_token_ids == {AutoTokenizer.from_pretrained(folder).eos_token_id} == {259}


def test_the_end_of_the_tokenizers_class_counts_only_where_a_file_has_the_token(tmp_path: Path) -> None:
    for name, expected in (("GPT2Tokenizer", {256}), ("GemmaTokenizer", set())):
        folder = folder_of(tmp_path / name, None, None, **{SETTINGS: {"tokenizer_class": name}})
        assert load_model_config(folder).eos_token_ids == expected


@pytest.mark.parametrize("value", ["x", True, [1.5], {"id": 2}])
@pytest.mark.parametrize("name", [CONFIG, GENERATION])
def test_an_end_that_is_no_integer_is_refused_with_its_file(tmp_path: Path, name: str, value: object) -> None:
    folder = folder_of(tmp_path / "m", value if name == CONFIG else END, value if name == GENERATION else None)
    for read in (load_model_config, Tokenizer.from_folder):
        with pytest.raises(RuntimeFailure, match=rf"{name}: eos_token_id is .*; it must be an integer"):
            read(folder)
