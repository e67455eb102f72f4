"""What the pages mention exists: files and modules of the repository, links and their anchors, tests by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = sorted(path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith("."))
SUFFIXES = "py|md|yaml|yml|json|toml|txt|in|sh|lua|sum|svg|tgz|mod"
IMPORT_ROOTS = (ROOT, ROOT / "operator", ROOT / "gateway", ROOT / "runtime", ROOT / "kernels", ROOT / "cli")
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")),
]
EVERY_MODULE = {
    path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if path.is_file()
}


def text_of(page: str) -> str:
    """The page; of the changelog its newest section, since older ones name the files of their time."""
    text = (ROOT / page).read_text(encoding="utf-8")
    if page == "CHANGELOG.md":
        return text.split("\n## ", 2)[1]
    return text


def is_there(mention: str) -> bool:
    """A module by its name or the end of its path; any other file by its path from the root, `*` for any name."""
    if mention.endswith(".py"):
        return any(f"/{module}".endswith(f"/{mention}") for module in EVERY_MODULE)
    return any(ROOT.glob(mention.rstrip("/")))


@pytest.mark.parametrize("page", sorted(PAGES))
def test_every_module_and_file_that_a_page_mentions_exists(page: str) -> None:
    text = re.sub(r"https?://\S+", "", text_of(page))
    modules = re.findall(r"(?<![\w./-])((?:[\w-]+/)*\w+\.py)\b", text)
    folders = "|".join(map(re.escape, FOLDERS))
    files = re.findall(rf"(?<![\w./-])((?:{folders})/[\w./*-]+\.(?:{SUFFIXES}))\b", text)
    inside = re.findall(rf"`((?:{folders})/[\w./*-]*/)`", text)
    missing = [one for one in {*modules, *files, *inside} if not is_there(one) and not is_of_the_reader(one)]
    assert missing == []


def is_of_the_reader(mention: str) -> bool:
    """Output paths and examples that a page invents."""
    return not mention.endswith(".py") and mention.startswith("models/") and not mention.startswith("models/demo")


@pytest.mark.parametrize("page", sorted(PAGES))
def test_every_module_that_a_page_runs_exists(page: str) -> None:
    ours = (*FOLDERS, "millstream_operator", "millstream_gateway", "millstream_runtime", "millstream")
    named = {name for name in re.findall(r"python3? -m ([\w.]+\w)", text_of(page)) if name.split(".")[0] in ours}
    assert [name for name in named if not can_run(name)] == []


def can_run(module: str) -> bool:
    path = module.replace(".", "/")
    return any((root / f"{path}.py").is_file() or (root / path / "__main__.py").is_file() for root in IMPORT_ROOTS)


@pytest.mark.parametrize("page", sorted(PAGES))
def test_every_link_leads_to_a_file_and_a_heading(page: str) -> None:
    folder = (ROOT / page).parent
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = folder / path if path else ROOT / page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors_of(file), target


def anchors_of(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", sorted(PAGES))
def test_every_test_that_a_page_names_exists(page: str) -> None:
    for module, name in re.findall(r"([\w./-]+\.py)::(\w+)", text_of(page)):
        files = [ROOT / one for one in EVERY_MODULE if f"/{one}".endswith(f"/{module}")]
        assert any(f"def {name}(" in file.read_text(encoding="utf-8") for file in files), f"{module}::{name}"
