"""What is trained on, watched and judged is never the same prompt; too little data is refused with the minimum."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from millstream_runtime.errors import InvalidConfigError
from millstream_runtime.models.registry import load_model_config
from millstream_runtime.tokenizing.tokenizer import Tokenizer
from millstream_runtime.tune_draft.documents import Prompt, TuningPrompts, read_prompts
from millstream_runtime.tune_draft.settings import TuneSettings
from tests.unit.tune_draft.conftest import rows

MOST, ANSWER = 48, 12


@pytest.fixture
def settings(target: Path, draft: Path, data: Path, tmp_path: Path) -> TuneSettings:
    return TuneSettings(
        target=target, draft=draft, data=data, out=tmp_path / "out", general=None, held_out=None, steps=1, minutes=None,
        temperature=1.0, answer_tokens=ANSWER, sequence_tokens=MOST, max_documents=100, rows=8, learning_rate=None,
        draft_tokens=5, seed=0, device="cpu",
    )  # fmt: skip


def read(settings: TuneSettings) -> TuningPrompts:
    tokenizer = Tokenizer.from_folder(settings.target)
    return read_prompts(settings, [tokenizer] * 2, load_model_config(settings.target).eos_token_ids, MOST)


def write(path: Path, found: list[dict[str, object]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in found))
    return path


def asked(prompts: list[Prompt]) -> set[tuple[int, ...]]:
    return {(*one.prompt_ids[:8],) for one in prompts}


def test_the_parts_share_no_prompt(settings: TuneSettings) -> None:
    found = read(settings)
    parts = [asked(one) for one in (found.training, found.watched, found.judged)]
    assert [len(one) for one in (found.watched, found.judged)] == [12, 20]
    assert not any(one & other for one in parts for other in parts if one is not other)
    assert read(settings) == found
    assert read(replace(settings, seed=1)) != found


def test_a_prompt_that_is_held_out_is_trained_on_nowhere(settings: TuneSettings, tmp_path: Path) -> None:
    """Also where another file has it, or another line with another answer."""
    data = write(tmp_path / "data.jsonl", rows(120, seed=3))
    held = rows(120, seed=3)[:30] + [row | {"slice": "mine"} for row in rows(120, seed=3)[30:60]]
    again = [{"prompt": row["prompt"], "completion": "other"} for row in held if "prompt" in row]
    general = rows(60, seed=9) + rows(120, seed=3)[:60] + again
    found = read(
        replace(
            settings,
            data=data,
            held_out=write(tmp_path / "held_out.jsonl", held),
            general=write(tmp_path / "general.jsonl", general),
        )
    )
    assert [(one.slice, one.is_general) for one in found.judged] == [("all", False)] * 30 + [("mine", True)] * 30
    assert not asked(found.judged) & asked(found.training + found.watched)
    assert {one.is_general for one in found.training} == {False, True}
    assert found.num_duplicates == 60 + 60 + len(again)


def test_other_work_is_judged_apart_also_where_its_slices_have_the_same_names(
    settings: TuneSettings, tmp_path: Path
) -> None:
    """Else what is gained on the data hides what is lost elsewhere. Slices that are too small are judged as `all`."""
    small = [row | {"slice": "abcd"[number % 4]} for number, row in enumerate(rows(70, seed=3))]
    for data in (rows(70, seed=3), small):
        path, general = write(tmp_path / "data.jsonl", data), write(tmp_path / "general.jsonl", rows(70, seed=9))
        found = read(replace(settings, data=path, general=general))
        for part in (found.watched, found.judged):
            slices = [{one.slice for one in part if one.is_general is general} for general in (False, True)]
            assert all(slices)
            assert not slices[0] & slices[1]


def test_held_out_documents_of_other_slices_alone_are_refused(settings: TuneSettings, tmp_path: Path) -> None:
    """Nothing would say whether the draft got better."""
    held = [row | {"slice": "chat"} for row in rows(40, seed=8)]
    with pytest.raises(InvalidConfigError, match=r"its slices are chat, and those of --data are all. Name them alike"):
        read(replace(settings, held_out=write(tmp_path / "held.jsonl", held)))


def test_documents_that_are_all_held_out_are_counted(settings: TuneSettings) -> None:
    with pytest.raises(InvalidConfigError, match="has 0 different documents and 70 more that --held-out or --data has"):
        read(replace(settings, held_out=settings.data))


def test_repeated_lines_count_once(settings: TuneSettings, tmp_path: Path) -> None:
    found = read(replace(settings, data=write(tmp_path / "twice.jsonl", rows(70, seed=3) * 2)))
    assert found.num_duplicates == 70


def test_prompt_and_answer_fit_and_a_long_prompt_keeps_its_end(settings: TuneSettings, tmp_path: Path) -> None:
    long: list[dict[str, object]] = [
        {"prompt": f"{number:03}{'x' * 50}end", "completion": "y" * 50} for number in range(70)
    ]
    found = read(replace(settings, data=write(tmp_path / "long.jsonl", long)))
    for one in found.training:
        assert len(one.prompt_ids) + ANSWER == MOST
        assert len(one.prompt_ids) + len(one.text_ids) == MOST
        assert Tokenizer.from_folder(settings.target).decode(one.prompt_ids).endswith("end")
    assert found.num_cut == len(found.training)


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (10, "--data {path} has 10 different documents, of which"),
        (45, "The least is 20 documents to train on, 20 to judge by with 1000 tokens in their answers"),
    ],
)
def test_too_little_data_is_refused_with_the_minimum(
    settings: TuneSettings, tmp_path: Path, count: int, words: str
) -> None:
    path = write(tmp_path / "few.jsonl", rows(count, seed=3))
    with pytest.raises(InvalidConfigError, match=r"Add documents\.") as refused:
        read(replace(settings, data=path))
    assert words.format(path=path) in str(refused.value)


def test_a_bad_line_has_its_number(settings: TuneSettings, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "fine"}\n{"prompt": "no answer"}\n')
    with pytest.raises(InvalidConfigError, match="Line 2 of"):
        read(replace(settings, data=path))
