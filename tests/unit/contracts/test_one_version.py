"""The package, its import packages, the chart and what the docs show have one version."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
IMPORT_PACKAGES = (
    "cli/millstream",
    "gateway/millstream_gateway",
    "operator/millstream_operator",
    "runtime/millstream_runtime",
)
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*.yaml")))
# An image, a chart's archive or a line of `millstream --version`, such as millstream-runtime:0.2.0.
SHOWN = re.compile(r"millstream(?:-operator|-runtime)?(?:[:-]| )v?(\d+\.\d+\.\d+)\b")


@pytest.mark.parametrize("package", IMPORT_PACKAGES)
def test_an_import_package_says_the_version_of_the_distribution(package: str) -> None:
    """`millstream --version`, `/version` and the User-Agent of downloads show it."""
    said = re.findall(r'^__version__ = "(.+)"$', (ROOT / package / "__init__.py").read_text(), re.MULTILINE)
    assert said == [VERSION]


def test_the_chart_and_what_it_installs_have_that_version() -> None:
    chart = yaml.safe_load((ROOT / "charts" / "millstream" / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)


def test_the_pages_show_no_other_version() -> None:
    shown = {(page.name, version) for page in PAGES for version in SHOWN.findall(page.read_text())}
    assert {(page, version) for page, version in shown if version != VERSION} == set()
    assert SHOWN.findall("millstream-runtime:0.1.0, millstream-0.2.0.tgz, millstream 0.3.0") == [
        "0.1.0",
        "0.2.0",
        "0.3.0",
    ]
