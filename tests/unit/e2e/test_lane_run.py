"""Both lanes as pytest runs them, with the fixtures of `e2e/conftest.py` and a kubectl that only notes its calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.deep

ROOT = Path(__file__).resolve().parents[3]
PLUGINS = ("xdist", "pytest_rerunfailures", "pytest_timeout", "no:cacheprovider")
TOOL = """#!/bin/sh
echo "$(basename "$0") $*" >> "$(dirname "$0")/../calls"
case "$1 $2" in
  "get configmap") echo millstream-test-cluster ;;
  "get crd") cat "$(dirname "$0")/../crd.json" ;;
  "get nodes") echo '{"items": []}' ;;
  "api-resources --namespaced=false") echo "nodes no v1 false Node"; echo "namespaces ns v1 false Namespace" ;;
esac
"""
CONFTEST = """
from pathlib import Path
import e2e.conftest
e2e.conftest.TOOLS = Path(__file__).parent
pytest_plugins = ["e2e.conftest"]
"""
TESTS = """
import json
import pytest
from e2e.shared_things import LEFTOVER_LABEL, LEFTOVER_VALUE, SharedThing

METADATA = {"name": "x", "labels": {LEFTOVER_LABEL: LEFTOVER_VALUE}}
NODE = json.dumps({"apiVersion": "v1", "kind": "Node", "metadata": METADATA})

@pytest.mark.parametrize("number", range(4))
def test_own(cluster, release, namespace, durations, number):
    cluster.kubectl("scale", "llmd/x", "-n", namespace, "--replicas=2")
    durations.seconds[f"own {number}"] = 1.0

def test_forgot_the_mark(cluster):
    cluster.kubectl("create", "-f", "-", stdin=NODE)

def test_forgot_the_mark_of_the_release(managed_release):
    managed_release.kill()

@pytest.fixture(scope="module")
def made_for_many(cluster):
    cluster.kubectl("create", "-f", "-", stdin=NODE)

@pytest.mark.shared(SharedThing.NODES)
def test_node(cluster, durations):
    cluster.kubectl("create", "-f", "-", stdin=NODE)
    durations.seconds["alone"] = 1.0

@pytest.mark.shared(SharedThing.NODES)
def test_a_fixture_of_many_touches_them(cluster, made_for_many):
    cluster.kubectl("cordon", "x")

@pytest.mark.shared(SharedThing.NODES, SharedThing.CRDS)
def test_marked_too_much(cluster):
    cluster.kubectl("cordon", "x")

@pytest.mark.shared(SharedThing.RELEASE)
def test_release(managed_release):
    managed_release.install()
"""

# A name of SERVED_FILES: all of its tests run in one process.
TOGETHER = """
import os
import pytest

@pytest.mark.parametrize("number", range(4))
def test_served(durations, number):
    durations.seconds[os.environ["PYTEST_XDIST_WORKER"]] = 1.0
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkout with a few end-to-end tests."""
    (tmp_path / "bin").mkdir()
    for tool in ("kubectl", "helm"):
        (tmp_path / "bin" / tool).write_text(TOOL)
        (tmp_path / "bin" / tool).chmod(0o755)
    spec = {"x-kubernetes-validations": [{"rule": "true"}]}
    schema = {"openAPIV3Schema": {"properties": {"spec": spec}}}
    (tmp_path / "crd.json").write_text(json.dumps({"spec": {"versions": [{"schema": schema}]}}))
    (tmp_path / "kubeconfig").write_text("    server: https://127.0.0.1:6443\n")
    (tmp_path / "images.json").write_text(json.dumps({"operator": "o:1", "runtime": "r:1"}))
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_few.py").write_text(TESTS)
    (tmp_path / "test_chat.py").write_text(TOGETHER)
    marks = ["e2e: needs a cluster", "shared(*things): touches what all share", "long: minutes", "quick: quick"]
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  " + "\n  ".join(marks) + "\n")
    return tmp_path


def run(folder: Path, *arguments: str) -> tuple[dict[str, str], str]:
    """pytest in a process of its own; how each test ended, and all that it printed."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = inherited | {
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # some take seconds to load, in each process
    }
    plugins = [word for name in PLUGINS for word in ("-p", name)]
    command = [sys.executable, "-m", "pytest", "-rA", "--import-mode=importlib", *plugins, *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    ends = (line.split(" - ")[0].split() for line in done.stdout.splitlines() if "test_few.py::" in line)
    kinds = ("PASSED", "FAILED", "ERROR")
    return {end[1].partition("::")[2]: end[0] for end in ends if end[0] in kinds}, done.stdout + done.stderr


def test_each_lane_runs_its_tests_and_a_test_that_does_not_say_what_it_touches_is_red(folder: Path) -> None:
    ended, said = run(folder, "--lane", "own", "--numprocesses", "2")
    assert ended == {
        **{f"test_own[{number}]": "PASSED" for number in range(4)},
        "test_forgot_the_mark": "FAILED",
        "test_forgot_the_mark_of_the_release": "ERROR",
    }, said
    assert "mark the test with @pytest.mark.shared(SharedThing.NODES)" in said
    assert "mark the test with @pytest.mark.shared(SharedThing.RELEASE)" in said
    calls = (folder / "calls").read_text().splitlines()
    assert len([call for call in calls if call.startswith("helm")]) == 1, "installed once, not once per process"
    assert not [call for call in calls if call.startswith("kubectl create")], "the command was not run"

    processes = {"gw0", "gw1"} & json.loads((folder / "e2e-durations.json").read_text()).keys()
    assert len(processes) == 1, "the tests of one served model run in one process"

    ended, said = run(folder, "--lane", "alone")
    assert ended == {
        "test_node": "PASSED",
        "test_a_fixture_of_many_touches_them": "ERROR",
        "test_marked_too_much": "ERROR",
        "test_release": "PASSED",
    }, said
    assert "the mark shared(CRDS) is not needed" in said
    measured = json.loads((folder / "e2e-durations.json").read_text())
    assert measured.keys() - processes == {"helm upgrade --install", "alone", *(f"own {number}" for number in range(4))}


def test_without_a_kubeconfig_several_processes_end_with_one_sentence(folder: Path) -> None:
    (folder / "kubeconfig").unlink()
    ended, said = run(folder, "--lane", "own", "--numprocesses", "2")
    assert ended == {}
    assert f"Exit: {folder}/kubeconfig is missing: run `make cluster-up`, or give --kubeconfig." in said
    assert "Traceback" not in said
