"""`make soak` makes each mistake and looks which test notices it; here, that it still can."""

from __future__ import annotations

from collections import Counter

import pytest
import yaml

from tests.mutations.catalogue import MUTATIONS
from tests.mutations.mutation import Mutation

LEAST_MUTATIONS = 60
LEAST_IN = {  # of each import package, and of each kind of file that is no Python
    "operator/millstream_operator/": 2,
    "runtime/millstream_runtime/": 2,
    "kernels/millstream_kernels/": 2,
    "cli/millstream/": 2,
    "charts/millstream/templates/": 1,
    "crds/": 1,
    "operator/millstream_operator/catalog/gpus.yaml": 1,
    "requirements/": 1,
}
TEXT = "limit = 3\nleast = 3\n"


def test_each_mistake_can_still_be_made_and_has_tests_that_notice_it() -> None:
    for mutation in MUTATIONS:
        mutation.check()
        assert mutation.missing_tests() == []
        assert mutation.tests


def test_only_tests_without_a_cluster_are_named() -> None:
    """tests/mutations/kills.py runs them in a copy of the checkout."""
    named = {test for mutation in MUTATIONS for test in mutation.tests}
    assert [test for test in named if not test.startswith(("tests/unit/", "tests/security/"))] == []


def test_there_are_enough_of_every_part() -> None:
    assert len(MUTATIONS) >= LEAST_MUTATIONS
    for folder, least in LEAST_IN.items():
        assert sum(mutation.file.startswith(folder) for mutation in MUTATIONS) >= least, folder


def test_no_mistake_is_listed_twice() -> None:
    counts = Counter((mutation.file, mutation.old, mutation.new) for mutation in MUTATIONS)
    assert [one for one, count in counts.items() if count > 1] == []


@pytest.mark.parametrize(("old", "times"), [("3", 2), ("4", 0)])
def test_text_that_does_not_stand_there_once_is_an_error(
    old: str, times: int, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("repository")
    (folder / "code.py").write_text(TEXT)
    monkeypatch.setattr("tests.mutations.mutation.REPOSITORY", folder)
    with pytest.raises(ValueError, match=f"has '{old}' {times} times"):
        Mutation.of("a limit is another", "code.py", old, "5").check()


@pytest.mark.parametrize(
    ("name", "text", "new", "error"),
    [
        ("code.py", "limit = 3\n", "limit = (3", SyntaxError),
        ("data.json", '{"limit = 3": 1}', '{"limit', ValueError),
        ("data.yaml", "a: limit = 3\n", 'a: "limit', yaml.YAMLError),
    ],
)
def test_a_file_that_no_longer_parses_is_an_error(
    name: str,
    text: str,
    new: str,
    error: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("repository")
    (folder / name).write_text(text)
    monkeypatch.setattr("tests.mutations.mutation.REPOSITORY", folder)
    Mutation.of("a limit is another", name, "limit = 3", "limit = 4").check()
    with pytest.raises(error):
        Mutation.of("a limit is another", name, "limit = 3", new).check()
