"""Own prices from a file that may change, and be wrong: the last good one counts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from millstream_operator.facts.catalog_watch import CatalogWatch


def price(watch: CatalogWatch) -> int:
    part = watch.catalog.get("L4-24GB")
    assert part is not None
    return part.hourly_milli_usd


def test_without_a_file_the_shipped_catalogue_counts() -> None:
    watch = CatalogWatch(None)
    assert not watch.refresh()
    assert watch.problem is None
    assert price(watch) > 0


def test_a_changed_file_is_read_again_and_an_unchanged_one_is_not(tmp_path: Path) -> None:
    file = tmp_path / "catalog.yaml"
    file.write_text("L4-24GB: {listPriceUSDPerHour: 0.5}")
    watch = CatalogWatch(file)
    assert price(watch) == 500
    assert not watch.refresh()
    file.write_text("L4-24GB: {listPriceUSDPerHour: 0.125}")
    assert watch.refresh()
    assert price(watch) == 125
    file.write_text("L4-24GB: {listPriceUSDPerHour: 0.125}  # the same in other words")
    assert not watch.refresh()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("L4-24GB: {listPriceUSDPerHour: cheap}", "listPriceUSDPerHour"),
        ("L4-24GB: {price: 1}", "price"),
        ("[]", "no mapping"),
        ("{", "not a YAML"),
        ("x" * (1 << 20) + "y", "larger than 1 MiB"),
    ],
)
def test_a_bad_file_changes_nothing_and_is_logged_once(
    tmp_path: Path, content: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "catalog.yaml"
    file.write_text("L4-24GB: {listPriceUSDPerHour: 0.5}")
    watch = CatalogWatch(file)
    file.write_text(content)
    assert not watch.refresh()
    assert not watch.refresh()
    assert price(watch) == 500
    assert said in (watch.problem or "")
    assert caplog.text.count("the GPU catalogue stays as it was") == 1
    file.write_text("")
    assert watch.refresh(), "an empty file changes nothing of the shipped catalogue"
    assert watch.problem is None


def test_a_file_that_is_not_there_is_a_problem_until_it_comes(tmp_path: Path) -> None:
    watch = CatalogWatch(tmp_path / "catalog.yaml")
    assert "No such file" in (watch.problem or "")
    (tmp_path / "catalog.yaml").write_text("L4-24GB: {listPriceUSDPerHour: 0.5}")
    assert watch.refresh()
    assert (watch.problem, price(watch)) == (None, 500)


def test_a_configmap_is_swapped_by_a_link(tmp_path: Path) -> None:
    """As the kubelet does it: the file's name and date need not change."""
    for name, price_usd in (("one", "0.5"), ("two", "0.7")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "catalog.yaml").write_text(f"L4-24GB: {{listPriceUSDPerHour: {price_usd}}}")
        os.utime(tmp_path / name / "catalog.yaml", (0, 0))
    (tmp_path / "..data").symlink_to(tmp_path / "one")
    (tmp_path / "catalog.yaml").symlink_to(Path("..data") / "catalog.yaml")
    watch = CatalogWatch(tmp_path / "catalog.yaml")
    (tmp_path / "new").symlink_to(tmp_path / "two")
    (tmp_path / "new").rename(tmp_path / "..data")
    assert watch.refresh()
    assert price(watch) == 700
