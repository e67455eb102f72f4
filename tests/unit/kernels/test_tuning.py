"""Tuning tables: what may be in one, what is read, what a GPU's times would change, and what they cannot."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from millstream_kernels import tune
from millstream_kernels.linear import w8a16, w16a16
from millstream_kernels.linear.tuned import tuned_tiles
from millstream_kernels.tuning import search
from millstream_kernels.tuning.candidates import SPACES, Tiles
from millstream_kernels.tuning.products import PRODUCTS
from millstream_kernels.tuning.search import ROWS, tuned, with_choice
from millstream_kernels.tuning.table import (
    ARCHITECTURES,
    Choices,
    Table,
    TuningTableError,
    architecture_of,
    classes_of,
    document_of,
    parse,
    path_of,
    read,
    table_of,
    tiles_for,
    using,
    write,
)
from tests.support.kernel_launches import recording_launches

CPU = torch.device("cpu")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_is_committed_is_whole_and_as_it_is_written(architecture: int, tmp_path: Path) -> None:
    table = read(path_of(architecture), architecture)
    assert table.capability == architecture
    assert [*table.kernels] == [*SPACES] == [*PRODUCTS]
    write(tmp_path / "again.json", table)
    assert (tmp_path / "again.json").read_bytes() == path_of(architecture).read_bytes()
    assert read(tmp_path / "again.json", architecture) == table
    assert [path.name for path in tmp_path.iterdir()] == ["again.json"]


def test_a_gpu_has_the_table_of_its_architecture() -> None:
    assert [architecture_of(one) for one in (80, 86, 89, 90, 100, 120)] == [80, 80, 80, 90, 90, 90]
    assert table_of(89) is table_of(80)
    assert tiles_for("w4a16", 65, 86).block_rows == 64
    assert tiles_for("w4a16", 65, 90).block_rows == 128


def test_rows_have_the_choice_of_the_first_class_with_room() -> None:
    choices = table_of(90).kernels["w8a8"].by_class
    for num_rows, most_rows in ((1, 16), (16, 16), (17, 64), (64, 64), (65, None), (10**6, None)):
        assert tiles_for("w8a8", num_rows, 90) == choices[most_rows]
    with pytest.raises(ValueError, match="w16a16 has no tiles for 65 rows"):
        tiles_for("w16a16", 65, 90)


def changed(change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    document = copy.deepcopy(document_of(table_of(90)))
    change(document)
    return document


def choice_of(document: dict[str, Any], kernel: str = "w8a16", place: int = 0) -> dict[str, Any]:
    return document["kernels"][kernel]["choices"][place]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda one: one.update(format=2), "format is 2; 1 is expected"),
        (lambda one: one.update(capability=80), "capability is 80; 90 is expected"),
        (lambda one: one.pop("kernels"), "the document lacks kernels"),
        (lambda one: one.update(more=1), "the document has unknown fields: more"),
        (lambda one: one["kernels"].pop("nf4"), "kernels lacks nf4"),
        (lambda one: one["kernels"].update(w2a16={}), "kernels has unknown fields: w2a16"),
        (lambda one: one["kernels"].update(nf4=[]), "kernels.nf4 is no object"),
        (lambda one: one["kernels"]["nf4"].update(measured_on=3), "kernels.nf4.measured_on is 3; a GPU's name or null"),
        (lambda one: one["kernels"]["nf4"]["choices"].pop(), "kernels.nf4.choices is no list of 3"),
        (lambda one: choice_of(one).pop("num_warps"), "kernels.w8a16.choices[0] lacks num_warps"),
        (lambda one: choice_of(one).update(num_warps="4"), "kernels.w8a16.choices[0].num_warps is '4'; a whole"),
        (lambda one: choice_of(one).update(num_stages=True), "kernels.w8a16.choices[0].num_stages is True; a whole"),
        (lambda one: choice_of(one).update(num_warps=16), "kernels.w8a16.choices[0] is no candidate of this kernel"),
        (lambda one: choice_of(one).update(block_rows=None), "kernels.w8a16.choices[0].block_rows is None; a whole"),
        (lambda one: choice_of(one, place=1).update(most_rows=32), "choices[1].most_rows is 32; 64 is expected"),
        (lambda one: choice_of(one, place=2).update(block_rows=128), "choices[2] is no candidate of this kernel"),
        (lambda one: choice_of(one).update(splits=4), "kernels.w8a16.choices[0] has unknown fields: splits"),
    ],
)
def test_a_damaged_table_is_refused_with_the_field(change: Callable[[dict[str, Any]], None], problem: str) -> None:
    assert parse(document_of(table_of(90)), 90, "sm_90.json") == table_of(90)
    with pytest.raises(TuningTableError) as refused:
        parse(changed(change), 90, "sm_90.json")
    assert str(refused.value).startswith("tuning table sm_90.json: ")
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "cannot be read: No such file"), ("{", "is no JSON"), ("[" * 100_000, "is no JSON")],
)
def test_a_file_that_is_no_table_is_refused(content: str | None, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "sm_90.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(TuningTableError, match=problem):
        read(path, 90)
    with pytest.raises(TuningTableError, match="the document is no object"):
        parse([], 90, "sm_90.json")


def test_a_candidate_is_used_in_its_block_alone() -> None:
    before, other = w8a16.plan(1, 128, 1024, 90), Tiles(16, 8, 5)
    with using(with_choice(table_of(90), "w8a16", 16, other)):
        inside = w8a16.plan(1, 128, 1024, 90)
        assert w8a16.plan(1, 128, 1024, 80).num_stages == 3, "another architecture"
        assert w8a16.plan(17, 128, 1024, 90).block_rows == 64, "another class"
    assert (inside.block_rows, inside.num_warps, inside.num_stages) == (16, 8, 5)
    assert inside.splits == before.splits
    assert w8a16.plan(1, 128, 1024, 90) == before


def test_variants_are_those_of_the_table() -> None:
    """Classes that share a choice share a variant; two choices of the same rows have names of their own."""
    table = with_choice(table_of(90), "w8a16", None, Tiles(64, 4, 2))
    with using(table):
        assert {name: (tiles, partial) for name, tiles, partial in tuned_tiles("w8a16", 90)} == {
            "rows16-partial": (Tiles(16, 4, 3), True),
            "rows64-partial": (Tiles(64, 8, 3), True),
            "rows64": (Tiles(64, 8, 3), False),
            "rows64-more": (Tiles(64, 4, 2), False),
        }
        made = [one for one in w8a16.w8a16_variants() if one.capabilities == (90,)]
    more = [one for one in made if one.name == "bf16-int8-rows64-more"]
    assert [(one.num_warps, one.num_stages) for one in more] == [(4, 2)]
    assert [name for name, _, _ in tuned_tiles("w8a16", 90)] == ["rows16-partial", "rows64-partial", "rows64"]


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("kernel", SPACES)
def test_no_candidate_changes_the_order_of_a_sum(kernel: str) -> None:
    """It changes the rows of a tile, warps and stages, and nothing else: neither tiles of inputs nor splits."""
    for most_rows in classes_of(kernel):
        for num_outputs in (128, 256 * 128):
            product = PRODUCTS[kernel](most_rows or 65, num_outputs, 1024, CPU)
            seen = set()
            for tiles in SPACES[kernel].candidates(most_rows):
                table = with_choice(table_of(90), kernel, most_rows, tiles)
                with using(table), recording_launches(executing=False) as launches:
                    product()
                first, *others = launches
                assert first.options == {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
                assert first.constants["BLOCK_ROWS"] == tiles.block_rows
                kept = {name: value for name, value in first.constants.items() if name != "BLOCK_ROWS"}
                seen.add((str(sorted(kept.items())), str(others)))
            assert len(seen) == 1


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("kernel", ["w4a16", "w8a8"])
def test_tiles_of_other_rows_give_the_same_bits(kernel: str) -> None:
    torch.manual_seed(0)
    product = PRODUCTS[kernel](65, 128, 256, CPU)
    found = []
    for block_rows in SPACES[kernel].block_rows[None]:
        with using(with_choice(table_of(90), kernel, None, Tiles(block_rows, 8, 3))):
            found.append(product())
    assert len(found) == 2
    assert torch.equal(*found)


def costs(quickest: Mapping[int | None, Tiles], faster: float = 0.5) -> search.Seconds:
    """A millisecond per product, `faster` times that with the quickest tiles; tiles with two stages do not start."""

    def seconds(kernel: str, table: Table, num_rows: int, num_outputs: int, num_inputs: int) -> float | None:
        tiles = table.tiles(kernel, num_rows)
        if tiles.num_stages == 2:
            return None
        return 1e-3 * (faster if tiles in quickest.values() else 1.0)

    return seconds


def test_the_quickest_candidate_that_starts_is_chosen() -> None:
    best: dict[int | None, Tiles] = {16: Tiles(16, 8, 6), 64: Tiles(64, 4, 3)}
    steps = [*tuned(table_of(90), "w16a16", "NVIDIA Test", costs(best))]
    assert [table.kernels["w16a16"].by_class[16] for _, table in steps] == [best[16], best[16]]
    _, table = steps[-1]
    assert table.kernels["w16a16"] == Choices(best, "NVIDIA Test")
    assert {name for name in SPACES if table.kernels[name] != table_of(90).kernels[name]} == {"w16a16"}
    assert steps[0][0] == (
        "w16a16, up to 16 rows: 16 rows x 8 warps x 6 stages, 500.0 µs (before 1000.0 µs by 16 rows x 4 warps x 5 "
        "stages; 8 candidates)"
    )


def test_a_choice_stays_where_others_are_hardly_quicker_or_do_not_start() -> None:
    kept = table_of(90).kernels["w16a16"].by_class
    other: dict[int | None, Tiles] = {16: Tiles(16, 8, 6), 64: Tiles(64, 4, 3)}
    for seconds in (costs(other, faster=0.985), costs({}), lambda *asked: None):
        *_, (line, table) = tuned(table_of(90), "w16a16", "NVIDIA Test", seconds)
        assert table.kernels["w16a16"] == Choices(kept, "NVIDIA Test")
        assert "as before" in line


def test_every_class_is_timed_with_the_fewest_and_the_most_of_its_rows() -> None:
    asked: dict[int | None, set[int]] = {}

    def seconds(kernel: str, table: Table, num_rows: int, num_outputs: int, num_inputs: int) -> float:
        most_rows = next(one for one in classes_of(kernel) if one is None or num_rows <= one)
        asked.setdefault(most_rows, set()).add(num_rows)
        return 1e-3

    [*tuned(table_of(90), "w8a8", "NVIDIA Test", seconds)]
    assert asked == {most_rows: {*rows} for most_rows, rows in ROWS.items()}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An sm_90 whose products take as long as `costs` says."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA Test")
    monkeypatch.setattr(tune, "install_compiling", lambda on_problem: None)
    monkeypatch.setattr(tune, "seconds_of", costs({16: Tiles(16, 8, 4)}))


def test_without_a_gpu_it_ends_with_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.main(["--out", str(tmp_path / "tables")]) == 1
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith("Nothing was tuned: kernels are timed on a CUDA device, and torch sees none.")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.usefixtures("gpu")
def test_a_gpu_that_kernels_do_not_take_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    assert tune.main([]) == 1
    assert "the GPU is sm_75, and kernels need sm_80" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 6))
    monkeypatch.setattr(tune, "ptxas_is_there", lambda: False)
    assert tune.main([]) == 1
    assert "candidates are compiled with ptxas, which is missing." in capsys.readouterr().err


@pytest.mark.usefixtures("gpu")
def test_a_run_goes_on_with_the_table_that_it_finds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kernel in ("w8a16", "w16a16"):
        assert tune.main(["--kernel", kernel, "--out", str(tmp_path)]) == 0
    table = read(tmp_path / "sm_90.json", 90)
    measured = {name for name, choices in table.kernels.items() if choices.measured_on}
    assert measured == {"w8a16", "w16a16"}
    assert {table.kernels[name].by_class[16] for name in measured} == {Tiles(16, 8, 4)}
    assert capsys.readouterr().out.count("\n") == 3 + 2
    damaged = json.loads((tmp_path / "sm_90.json").read_text()) | {"capability": 80}
    (tmp_path / "sm_90.json").write_text(json.dumps(damaged))
    assert tune.main(["--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "tuning table sm_90.json: capability is 80; 90 is expected\n"


@pytest.mark.usefixtures("gpu")
def test_a_folder_that_cannot_be_written_is_one_sentence_before_anything_is_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(tune, "seconds_of", lambda *_: pytest.fail("a product was timed"))
    for out, problem in ((tmp_path / "file", "File exists"), (Path("/proc/tables"), "No such file or directory")):
        assert tune.main(["--out", str(out)]) == 1
        assert capsys.readouterr().err == f"The table cannot be written to {out}: {problem}.\n"
    monkeypatch.setattr(os, "access", lambda *_: False)  # as on a file system that is read-only
    assert tune.main(["--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"The table cannot be written to {tmp_path}: Permission denied.\n"


@pytest.mark.usefixtures("gpu")
def test_a_second_run_for_one_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tune._only_run_in(tmp_path):
        assert tune.main(["--kernel", "w8a16", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err.endswith(": another run of this command writes there.\n")
    assert [*tmp_path.iterdir()] == []
    assert tune.main(["--kernel", "w8a16", "--out", str(tmp_path)]) == 0


@pytest.mark.usefixtures("gpu")
def test_a_run_that_is_interrupted_keeps_what_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = costs({16: Tiles(16, 8, 4)})

    def until_the_second_class(kernel: str, table: Table, num_rows: int, *sizes: int) -> float | None:
        if num_rows > 16:
            raise KeyboardInterrupt
        return found(kernel, table, num_rows, *sizes)

    monkeypatch.setattr(tune, "seconds_of", until_the_second_class)
    assert tune.main(["--kernel", "w16a16", "--out", str(tmp_path)]) == 130
    said = capsys.readouterr()
    assert said.out.startswith("w16a16, up to 16 rows: 16 rows x 8 warps x 4 stages")
    assert said.err == f"interrupted; {tmp_path} has the classes of rows that were printed\n"
    assert read(tmp_path / "sm_90.json", 90).tiles("w16a16", 16) == Tiles(16, 8, 4)


def test_up_to_64_rows_a_weight_is_read_once() -> None:
    """One tile holds all rows, whatever is chosen."""
    for kernel, space in SPACES.items():
        for most_rows in (16, 64):
            assert all(one.block_rows >= most_rows for one in space.candidates(most_rows)), kernel
    assert w16a16.MAX_ROWS == 64
