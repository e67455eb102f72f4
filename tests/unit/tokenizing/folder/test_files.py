"""Files of a folder that cannot be used are refused by name; those that contradict each other are said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.tokenizing.folder.files import SETTINGS_LIMIT_BYTES
from millstream_runtime.tokenizing.tokenizer import Tokenizer
from tests.support.text_folders import NAMED, settings, text_folder

SETTINGS, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
NAMES = ("tokenizer.json", SETTINGS, MAP, ADDED, "config.json", "generation_config.json")


def refusal(folder: Path) -> str:
    with pytest.raises(RuntimeFailure) as caught:
        Tokenizer.from_folder(folder)
    assert caught.value.reason is FailureReason.CHECKPOINT_INVALID
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"a": "\xff"}', b"[" * 100_000])
def test_a_file_that_is_no_json_object_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    folder = text_folder(tmp_path / "m", {SETTINGS: settings(**NAMED)})
    (folder / name).write_bytes(content)
    assert str(folder / name) in refusal(folder)


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_or_a_dangling_link_in_place_of_a_file_is_named(tmp_path: Path, name: str) -> None:
    folder = text_folder(tmp_path / "m", {SETTINGS: settings(**NAMED)})
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()
    assert f"{folder / name} is not a file" in refusal(folder)
    (folder / name).rmdir()
    (folder / name).symlink_to("../blobs/gone")
    assert f"{folder / name} is a link to a file that does not exist" in refusal(folder)


@pytest.mark.parametrize("name", [SETTINGS, MAP, ADDED, "generation_config.json"])
def test_a_file_of_100_mb_is_refused_before_it_is_parsed(tmp_path: Path, name: str) -> None:
    folder = text_folder(tmp_path / "m", {SETTINGS: settings(**NAMED)})
    with (folder / name).open("wb") as file:
        file.truncate(100 << 20)
    assert f"{folder / name} is larger than {SETTINGS_LIMIT_BYTES >> 20} MiB" in refusal(folder)


@pytest.mark.parametrize("missing", [SETTINGS, MAP, ADDED, "config.json"])
def test_a_file_that_is_missing_says_nothing(tmp_path: Path, missing: str) -> None:
    folder = text_folder(tmp_path / "m", {SETTINGS: settings(**NAMED), MAP: NAMED, ADDED: {"<|turn|>": 259}})
    (folder / missing).unlink()
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("<|im_end|>") == [258]
    assert (tokenizer.encode("<|turn|>") == [259]) == (missing != ADDED)


def test_of_a_key_that_is_given_twice_the_last_value_counts_and_is_named(tmp_path: Path) -> None:
    text = '{"eos_token": "<|im_start|>", "eos_token": "<|im_end|>", "bos_token": "a", "bos_token": "a"}'
    choices = Tokenizer.from_folder(text_folder(tmp_path / "m", {SETTINGS: text})).choices
    assert choices.special_tokens["eos_token"] == ("<|im_end|>", SETTINGS)
    assert choices.notes == ("tokenizer_config.json gives eos_token twice: the last value counts.",)


def test_what_is_not_applied_is_named(tmp_path: Path) -> None:
    other = settings(split_special_tokens=True, fast_tokenizer_files=["tokenizer.json", "tokenizer.4.0.json"])
    notes = Tokenizer.from_folder(text_folder(tmp_path / "m", {SETTINGS: other})).choices.notes
    assert [note for note in notes if "split_special_tokens, which is not applied" in note]
    assert [note for note in notes if "(tokenizer.json, tokenizer.4.0.json): tokenizer.json is read" in note]
    other = settings(
        fix_mistral_regex=True, clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True
    )
    notes = Tokenizer.from_folder(text_folder(tmp_path / "mistral", {SETTINGS: other})).choices.notes
    assert [note for note in notes if "fix_mistral_regex, which is not applied" in note]
    assert [note for note in notes if "even_though_it_will_corrupt_output, which is not applied" in note]
    usual = settings(
        split_special_tokens=False,
        clean_up_tokenization_spaces=True,  # transformers applies it to no BPE
        model_specific_special_tokens={},
        fast_tokenizer_files=["tokenizer.json"],
    )
    assert not Tokenizer.from_folder(text_folder(tmp_path / "usual", {SETTINGS: usual})).choices.notes


WRONG: list[tuple[str, Any, str]] = [
    (SETTINGS, {"eos_token": 3}, "eos_token is 3; it must be a text"),
    (SETTINGS, {"eos_token": {"content": 3}}, "eos_token is {'content': 3}; it must be a text"),
    (SETTINGS, {"eos_token": {"content": "a", "lstrip": 1}}, "eos_token.lstrip is 1; it must be true or false"),
    (SETTINGS, {"eos_token": "a" * 20_000}, "eos_token has a token of 20000 characters"),
    (SETTINGS, {"additional_special_tokens": "a"}, "additional_special_tokens is 'a'; it must be a list"),
    (SETTINGS, {"additional_special_tokens": [[]]}, "additional_special_tokens[0] is []; it must be a text"),
    (SETTINGS, {"extra_special_tokens": {"x": 1}}, "extra_special_tokens.x is 1; it must be a text"),
    (SETTINGS, {"added_tokens_decoder": []}, "added_tokens_decoder is []; it must be an object"),
    (SETTINGS, {"added_tokens_decoder": {"x": {"content": "a"}}}, "has the key 'x'; it must be a token's id"),
    (SETTINGS, {"added_tokens_decoder": {"-1": {"content": "a"}}}, "has the key '-1'; it must be a token's id"),
    (SETTINGS, {"added_tokens_decoder": {"1": "a"}}, "added_tokens_decoder.1 is 'a'; it must be an object"),
    (SETTINGS, {"model_specific_special_tokens": []}, "model_specific_special_tokens is []; it must be an object"),
    (SETTINGS, {"tokenizer_class": 1}, "tokenizer_class is 1; it must be a text"),
    (MAP, {"eos_token": []}, "eos_token is []; it must be a text"),
    (ADDED, {"<x>": "1"}, "<x> is '1'; it must be the token's id"),
    (ADDED, {"<x>": 10**12}, "<x> is 1000000000000; it must be the token's id"),
]


@pytest.mark.parametrize(("name", "content", "named"), WRONG)
def test_a_field_of_another_form_is_named_with_its_file(tmp_path: Path, name: str, content: Any, named: str) -> None:
    message = refusal(text_folder(tmp_path / "m", {name: content}))
    assert f"{name}: " in message
    assert named in message


def test_more_added_tokens_than_any_model_has_are_refused(tmp_path: Path) -> None:
    many = {str(number): {"content": f"<{number}>"} for number in range(259, 70_000)}
    assert "at most 65536 may be" in refusal(text_folder(tmp_path / "m", {SETTINGS: {"added_tokens_decoder": many}}))


def test_a_token_that_no_vocabulary_has_gets_the_next_id(tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "m", {SETTINGS: json.dumps({"eos_token": "<|nowhere|>"})})
    assert Tokenizer.from_folder(folder).encode("<|nowhere|>") == [259]
