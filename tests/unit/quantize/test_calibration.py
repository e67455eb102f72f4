"""Calibration data: each document once, a seeded part held out, sequences of one length, errors with line and least."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from millstream_runtime.errors import InvalidConfigError
from millstream_runtime.quantize.calibration import CalibrationData, read_calibration
from millstream_runtime.tokenizing.tokenizer import Tokenizer


def read(tiny: Path, path: Path, lines: Iterable[Any], **settings: Any) -> CalibrationData:
    path.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines))
    numbers = {"sequence_tokens": 128, "max_sequences": 1000, "seed": 0, "least_tokens": 512, "judged_tokens": 2048}
    asked: dict[str, Any] = {"hold_out": True, "must_judge": True, **numbers, **settings}
    return read_calibration(path, Tokenizer.from_folder(tiny), frozenset({258}), **asked)


def texts(count: int, slice_name: str = "all", length: int = 100) -> list[dict[str, str]]:
    choose = random.Random(count)
    return [{"text": "".join(choose.choices("abcdef", k=length)), "slice": slice_name} for _ in range(count)]


def test_sequences_have_one_length_and_hold_no_held_out_document(tiny: Path, tmp_path: Path) -> None:
    lines = texts(200)
    found = read(tiny, tmp_path / "a.jsonl", lines)
    held_out = [json.loads(one)["text"] for one in found.held_out]
    assert {len(one) for one in found.sequences} == {128}
    assert 20 <= len(held_out) <= 30
    assert len(found.sequences) == (200 - len(held_out)) * 100 // 128
    stream = Tokenizer.from_folder(tiny).decode([token for one in found.sequences for token in one])
    assert not any(text in stream for text in held_out)
    assert sum(one["text"] in stream for one in lines) >= 170


def test_a_document_counts_once(tiny: Path, tmp_path: Path) -> None:
    lines = texts(100)
    once = read(tiny, tmp_path / "a.jsonl", lines)
    often = read(tiny, tmp_path / "b.jsonl", [*lines, *lines[:50], *lines])
    assert (once.num_duplicates, often.num_duplicates) == (0, 150)
    assert once.sequences == often.sequences
    assert once.held_out == often.held_out


def test_the_seed_decides_and_the_same_one_gives_the_same(tiny: Path, tmp_path: Path) -> None:
    lines = texts(100)
    first, again, other = (read(tiny, tmp_path / "a.jsonl", lines, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.sequences != other.sequences
    assert first.held_out != other.held_out


def test_no_more_sequences_than_asked_for(tiny: Path, tmp_path: Path) -> None:
    assert len(read(tiny, tmp_path / "a.jsonl", texts(200), max_sequences=5).sequences) == 5


def test_each_slice_gives_its_part_and_a_small_one_is_judged_with_the_others(tiny: Path, tmp_path: Path) -> None:
    found = read(tiny, tmp_path / "a.jsonl", texts(100, "chat") + texts(60, "code"))
    assert {json.loads(one)["slice"] for one in found.held_out} == {"chat", "code"}
    found = read(tiny, tmp_path / "a.jsonl", texts(100, "chat") + texts(9, "code"))
    assert {json.loads(one)["slice"] for one in found.held_out} == {"all"}


def test_chats_and_completions_keep_their_form(tiny: Path, tmp_path: Path) -> None:
    letters = random.Random(0)
    chats = [
        {
            "messages": [
                {"role": "user", "content": "".join(letters.choices("xyz", k=20))},
                {"role": "assistant", "content": "".join(letters.choices("abc", k=60))},
            ]
        }
        for _ in range(60)
    ]
    found = read(tiny, tmp_path / "a.jsonl", chats)
    assert all(json.loads(one)["messages"] in [chat["messages"] for chat in chats] for one in found.held_out)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([*texts(50), "{not json"], "Line 51 of"),
        ([*texts(50), {"text": 7}], "Line 51 of"),
        (texts(30), "40 documents, of which half is held out"),
        (texts(45, length=24), "The least is 512 tokens to calibrate with"),
        ([], "has no document"),
    ],
)
def test_bad_or_too_little_data_is_refused_with_line_or_least(
    tiny: Path, tmp_path: Path, lines: list[Any], words: str
) -> None:
    with pytest.raises(InvalidConfigError, match=words):
        read(tiny, tmp_path / "a.jsonl", lines, least_tokens=512)


def test_a_prompt_that_the_model_cannot_judge_is_not_held_out(tiny: Path, tmp_path: Path) -> None:
    """It would end the run after the last layer: no room is left for a token of the answer."""
    long = [{"prompt": f"{number:03}{'x' * 200}", "completion": "y" * 90} for number in range(60)]
    found = read(tiny, tmp_path / "a.jsonl", [*long, *texts(60)], judged_tokens=150)
    assert found.held_out
    assert all("text" in json.loads(one) for one in found.held_out)


@pytest.mark.parametrize("sequence_tokens", [2048, 400])
def test_data_that_fills_too_few_sequences_is_refused(tiny: Path, tmp_path: Path, sequence_tokens: int) -> None:
    """Without this a run with long sequences had none of them."""
    settings = {"sequence_tokens": sequence_tokens, "must_judge": False, "least_tokens": 512}
    words = rf"has 15 different .* The least is 512 tokens to calibrate with in whole sequences of {sequence_tokens}"
    with pytest.raises(InvalidConfigError, match=words):
        read(tiny, tmp_path / "a.jsonl", texts(15, length=50), **settings)


def test_little_data_is_enough_where_nothing_is_judged(tiny: Path, tmp_path: Path) -> None:
    found = read(tiny, tmp_path / "a.jsonl", texts(10), must_judge=False)
    assert found.held_out == []
    assert len(found.sequences) == 7
