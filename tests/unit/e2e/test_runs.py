"""What runs once per run: the lock of the cluster, the sweep, the installation, and what the processes measured."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from e2e.durations import Durations
from e2e.lanes import LONG_FIRST, Lane, in_lane, refusal, shared_things
from e2e.leftovers import CRD_FILE, SELECTOR
from e2e.preparation import CANNOT_RUN, Files, prepare
from e2e.run_lock import AnotherRunError, hold, lock_file
from e2e.scheduling import SERVED_FILES, group_of
from e2e.shared_things import SharedThing

pytestmark = pytest.mark.deep

ROOT = Path(__file__).resolve().parents[3]
# Each line of $0.calls is a call. `get crd` shows a CRD that lost its rules to an interrupted test.
KUBECTL = """#!/bin/sh
echo "$(basename "$0") $*" >> "$(dirname "$0")/calls"
case "$1 $2" in
  "get configmap") [ -e "$(dirname "$0")/strange" ] || echo millstream-test-cluster ;;
  "get crd") cat "$(dirname "$0")/crd.json" ;;
  "api-resources --namespaced=false") echo "nodes no v1 false Node" ;;
  "upgrade --install") [ ! -e "$(dirname "$0")/broken" ] || { echo "timed out" >&2; exit 1; } ;;
  "logs -n") echo "[pod/operator] no rights" ;;
esac
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for tool in ("kubectl", "helm"):
        (tmp_path / tool).write_text(KUBECTL)
        (tmp_path / tool).chmod(0o755)
    (tmp_path / "kubeconfig").write_text("clusters:\n- cluster:\n    server: https://127.0.0.1:6443\n")
    (tmp_path / "images.json").write_text(json.dumps({"operator": "o:1", "runtime": "r:1"}))
    (tmp_path / "crd.json").write_text(json.dumps(crd_without_rules()))
    return Files(tmp_path / "kubeconfig", tmp_path / "images.json", tmp_path)


def crd_without_rules() -> dict[str, Any]:
    spec: dict[str, Any] = {"x-kubernetes-validations": []}
    schema = {"openAPIV3Schema": {"properties": {"spec": spec}}}
    return {"spec": {"versions": [{"schema": schema}]}}


def run(files: Files, durations: Durations) -> list[str]:
    """Prepare a run; the commands that it took."""
    cluster = files.open_cluster()
    lock = prepare(cluster, files.release(cluster), files.kubeconfig, durations)
    assert lock is not None
    lock.close()
    return (files.tools / "calls").read_text().splitlines()


def test_a_run_deletes_leftovers_installs_once_and_puts_the_rules_back(files: Files) -> None:
    durations = Durations()
    calls = run(files, durations)
    deleted = [call for call in calls if f"-l {SELECTOR}" in call]
    for kind in ("nodes", "customresourcedefinitions", "clusterroles", "validatingadmissionpolicies", "namespaces"):
        assert any(kind in call for call in deleted), kind
    (installed,) = [call for call in calls if call.startswith("helm upgrade")]
    assert "operator.image=o:1" in installed
    assert "operator.recheckSeconds=2" in installed
    assert calls.index(deleted[0]) < calls.index(installed)
    (patched,) = [call for call in calls if call.startswith("kubectl patch crd")]
    assert "optionalOldSelf" in patched
    assert list(durations.seconds) == ["helm upgrade --install"]
    assert CRD_FILE.is_file()


MISSING: dict[str, tuple[str, Callable[[Files], object]]] = {
    "kubeconfig": ("make cluster-up", lambda files: files.kubeconfig.unlink()),
    "images": ("make images", lambda files: files.images.unlink()),
    "a name of images": ("make images", lambda files: files.images.write_text('{"operator": "o:1"}')),
    "images cut off": ("make images", lambda files: files.images.write_text('{"operator": ')),
    "the cluster's marker": ("not made for tests", lambda files: (files.tools / "strange").touch()),
    "a working operator": ("The operator does not start.", lambda files: (files.tools / "broken").touch()),
}


@pytest.mark.parametrize("what", MISSING)
def test_what_is_missing_ends_the_run_with_one_sentence_and_a_status_of_its_own(files: Files, what: str) -> None:
    words, take_away = MISSING[what]
    take_away(files)
    with pytest.raises(pytest.exit.Exception, match=words) as caught:
        run(files, Durations())
    assert caught.value.returncode == CANNOT_RUN


def test_the_operators_log_says_why_it_does_not_start(files: Files) -> None:
    (files.tools / "broken").touch()
    with pytest.raises(pytest.exit.Exception, match=r"timed out[\s\S]*no rights"):
        run(files, Durations())


def test_a_second_run_on_the_cluster_says_so_and_ends(files: Files) -> None:
    with hold(lock_file(files.kubeconfig)):
        with pytest.raises(pytest.exit.Exception, match=r"on this cluster already \(process \d+\)") as caught:
            run(files, Durations())
        assert not [call for call in (files.tools / "calls").read_text().splitlines() if "delete" in call]
    assert caught.value.returncode == CANNOT_RUN
    run(files, Durations())


def test_another_cluster_has_another_lock_and_another_checkouts_kubeconfig_the_same(files: Files) -> None:
    copy = files.tools / "copy"
    copy.write_text(files.kubeconfig.read_text() + "# of another checkout\n")
    other = files.tools / "other"
    other.write_text("    server: https://127.0.0.1:7000\n")
    assert lock_file(copy) == lock_file(files.kubeconfig) != lock_file(other)


def test_a_cache_that_cannot_be_written_is_said_and_the_run_goes_on(
    files: Files, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(_: Path) -> Path:
        raise OSError("Read-only file system")

    monkeypatch.setattr("e2e.preparation.lock_file", refused)
    cluster = files.open_cluster()
    assert prepare(cluster, files.release(cluster), files.kubeconfig, Durations()) is None
    assert "two runs at once would not notice each other: Read-only file system" in capsys.readouterr().out


def test_a_lock_that_a_killed_run_left_holds_nobody_back(files: Files) -> None:
    path = lock_file(files.kubeconfig)
    path.write_text("12345")
    hold(path).close()
    with hold(path), pytest.raises(AnotherRunError, match=str(os.getpid())):
        hold(path)


def item(name: str, *things: object) -> Any:
    marks = [pytest.mark.shared(*things).mark] if things else []
    return SimpleNamespace(nodeid=name, path=Path(name), iter_markers=lambda _: iter(marks))


def test_every_test_is_in_one_lane_and_long_ones_begin_first() -> None:
    own = [item("test_a.py"), item(LONG_FIRST[1]), item(LONG_FIRST[0])]
    alone = [item("test_inventory.py", SharedThing.NODES), item("test_uninstall.py", SharedThing.RELEASE)]
    everything = [alone[0], *own, alone[1]]
    assert in_lane(everything, Lane.OWN) == [own[2], own[1], own[0]]
    assert in_lane(everything, Lane.ALONE) == alone
    assert in_lane(everything, None) == everything


@pytest.mark.parametrize("things", [("nodes",), (1,), ("NODES", SharedThing.NODES)])
def test_a_mark_with_another_word_is_refused(things: tuple[object, ...]) -> None:
    with pytest.raises(pytest.UsageError, match="takes members of SharedThing: RELEASE, "):
        shared_things(item("test_a.py", *things))


def test_files_that_are_named_exist() -> None:
    assert all((ROOT / "e2e" / name).is_file() for name in {*LONG_FIRST, *SERVED_FILES})


def test_tests_of_one_served_model_are_one_group_and_others_are_alone() -> None:
    assert {group_of(f"e2e/{name}::test_{name}") for name in SERVED_FILES} == {"served"}
    assert group_of("e2e/test_status.py::test_a[x/y]") != group_of("e2e/test_status.py::test_a[x/z]")


def test_tests_that_change_what_all_share_are_not_run_beside_others() -> None:
    assert refusal(Lane.OWN, 2) == refusal(None, 0) == refusal(None, 1) == refusal(Lane.ALONE, 0) == ""
    for lane in (None, Lane.ALONE):
        assert "make e2e" in refusal(lane, 2)


def test_two_calls_keep_what_each_measured(tmp_path: Path) -> None:
    path = tmp_path / "tools" / "e2e-durations.json"
    for name in ("apply", "upgrade"):
        durations = Durations()
        durations.seconds[name] = 1.5
        durations.write(path)
    assert json.loads(path.read_text()) == {"apply": 1.5, "upgrade": 1.5}
    path.write_text('{"apply": ')
    durations.write(path)
    assert json.loads(path.read_text()) == {"upgrade": 1.5}
