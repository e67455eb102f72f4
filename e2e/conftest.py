"""Options and shared fixtures of the end-to-end tests."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from e2e.cluster import Cluster
from e2e.deployments import FLOAT32_ENGINE, MODEL, PULL_TIMEOUT_SECONDS, Served, has_image, llmd, wait_ready
from e2e.durations import Durations
from e2e.guard import refusal as guard_refusal
from e2e.lanes import Lane, in_lane, shared_things
from e2e.lanes import refusal as lane_refusal
from e2e.preparation import Files, prepare
from e2e.release import ManagedRelease, Release
from e2e.scheduling import SERVED_FILES, LaneScheduling
from e2e.shared_things import KEPT_VALUE, LEFTOVER_LABEL, LEFTOVER_VALUE, SharedThing
from hack.cluster.kind_config import without_proxy

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / ".tools"
MEASURED = "e2e durations"  # of a process, for the one that started it
_DURATIONS = pytest.StashKey[Durations]()
_FILES = pytest.StashKey[Files]()
_LOCK = pytest.StashKey[IO[str] | None]()
_CLUSTER = pytest.StashKey[Cluster]()
_PASSED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("e2e")
    group.addoption("--kubeconfig", type=Path, default=TOOLS / "kubeconfig", help="cluster to test against")
    group.addoption("--images", type=Path, default=TOOLS / "images.json", help='{"operator": ref, "runtime": ref}')
    group.addoption(
        "--lane", type=Lane, choices=list(Lane), help="own: tests that may run beside others; alone: others"
    )
    group.addoption("--long", action="store_true", help="run the tests that take minutes each, too")
    group.addoption("--keep-namespaces", action="store_true", help="leave the tests' namespaces for a look at them")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_DURATIONS] = Durations()
    config.stash[_FILES] = Files(config.getoption("--kubeconfig"), config.getoption("--images"), TOOLS / "bin")
    os.environ.update(without_proxy(os.environ))  # forwarded ports are on 127.0.0.1
    processes = 0 if _is_worker(config) else len(config.getoption("tx", default=[]))
    if refusal := lane_refusal(config.getoption("--lane"), processes):
        raise pytest.UsageError(refusal)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("long") is not None and not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="takes minutes: `make e2e-long`"))
        item.add_marker(pytest.mark.e2e)
        item.add_marker(pytest.mark.flaky(reruns=1))  # as in tests/conftest.py
        if item.get_closest_marker("timeout") is None:  # the first test of a run also waits for the pull
            item.add_marker(pytest.mark.timeout(PULL_TIMEOUT_SECONDS + 300))
        if "served" in getattr(item, "fixturenames", ()) and not _is_together(item):
            raise pytest.UsageError(f"{item.nodeid} uses `served`: add its file to SERVED_FILES of e2e/scheduling.py.")
    items.sort(key=lambda item: item.path.name == "test_uninstall.py")  # it takes everybody's models away: last
    chosen = in_lane(items, config.getoption("--lane"))
    if left_out := [item for item in items if item not in set(chosen)]:
        config.hook.pytest_deselected(items=left_out)
    items[:] = chosen


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if call.when == "call":
        item.stash[_PASSED] = report.passed
    return report


# Several processes: the one that starts them prepares the cluster, and collects what they measured.


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    _prepared(config)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LaneScheduling | None:
    return LaneScheduling(config, log) if config.getoption("--lane") is Lane.OWN else None


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    measured = getattr(node, "workeroutput", {}).get(MEASURED, {})
    node.config.stash[_DURATIONS].seconds.update(measured)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _is_worker(session.config):
        session.config.workeroutput[MEASURED] = session.config.stash[_DURATIONS].seconds  # type: ignore[attr-defined]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    durations = config.stash[_DURATIONS]
    if not durations.seconds:
        return
    terminalreporter.section("measured")
    for name, seconds in durations.seconds.items():
        terminalreporter.write_line(f"{seconds:7.1f} s  {name}")
    durations.write(TOOLS / "e2e-durations.json")


def _is_together(item: pytest.Item) -> bool:
    """Whether a test of the fixture `served` runs in the process of all the others, or alone."""
    return item.path.name in SERVED_FILES or bool(shared_things(item))


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def _prepared(config: pytest.Config) -> Cluster:
    """The cluster, with the operator of this checkout running on it."""
    if _CLUSTER not in config.stash:
        files = config.stash[_FILES]
        cluster = files.open_cluster()
        if not _is_worker(config):
            lock = prepare(cluster, files.release(cluster), files.kubeconfig, config.stash[_DURATIONS])
            config.stash[_LOCK] = lock
        config.stash[_CLUSTER] = cluster
    return config.stash[_CLUSTER]


@pytest.fixture(scope="session")
def durations(request: pytest.FixtureRequest) -> Durations:
    """Where tests put what they measured."""
    return request.config.stash[_DURATIONS]


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Cluster:
    """The cluster under test. It refuses commands that touch what all tests share (`shared_things.py`)."""
    return _prepared(request.config)


@pytest.fixture(scope="session")
def release(request: pytest.FixtureRequest, cluster: Cluster) -> Release:
    """The operator of this checkout, running: to be read."""
    managed = request.config.stash[_FILES].release(cluster)
    return Release(cluster, managed.operator_image, managed.runtime_image)


@pytest.fixture
def managed_release(request: pytest.FixtureRequest, release: Release) -> ManagedRelease:
    """The same, to be changed by a test that is marked `shared(SharedThing.RELEASE)` or `…OPERATOR`."""
    if not shared_things(request.node) & {SharedThing.RELEASE, SharedThing.OPERATOR}:
        pytest.fail(guard_refusal("the fixture managed_release", SharedThing.RELEASE), pytrace=False)
    return ManagedRelease(release.cluster, release.operator_image, release.runtime_image)


@pytest.fixture(autouse=True)
def _only_what_is_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    """The test touches of what all share what it has marks for, and has no mark that it does not need."""
    if "cluster" not in request.fixturenames:
        yield
        return
    guard = request.getfixturevalue("cluster").guard
    guard.begin_test(shared_things(request.node))
    yield
    unused = guard.unused()
    guard.begin_test(())  # fixtures of many tests are made between two of them, and have no marks
    if unused and request.node.stash.get(_PASSED, False):
        names = ", ".join(thing.name for thing in unused)
        pytest.fail(f"the mark shared({names}) is not needed: the test touches no such thing.", pytrace=False)


@pytest.fixture
def namespace(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[str]:
    """A namespace for one test, which admits restricted pods only."""
    yield from _namespace(request, cluster, request.node.name)


def _namespace(request: pytest.FixtureRequest, cluster: Cluster, wish: str) -> Iterator[str]:
    words = re.sub(r"[^a-z0-9]+", "-", wish.lower().removeprefix("test_"))[:40].strip("-")
    name = f"e2e-{words}-{secrets.token_hex(2)}"
    is_kept = request.config.getoption("--keep-namespaces")
    labels = {
        "pod-security.kubernetes.io/enforce": "restricted",
        LEFTOVER_LABEL: KEPT_VALUE if is_kept else LEFTOVER_VALUE,
    }
    cluster.guard.own_namespaces.add(name)
    cluster.apply(name, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    yield name
    if not is_kept:
        cluster.kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")


@pytest.fixture(scope="session")
def warm_image(request: pytest.FixtureRequest, cluster: Cluster, release: Release, durations: Durations) -> None:
    """The runtime image on the node, so that no test measures a pull."""
    if has_image(cluster, release.runtime_image):
        return
    for name in _namespace(request, cluster, "pull"):
        with durations.measure("first LLMDeployment Ready (image pull included)"):
            cluster.apply(name, llmd("pull"))
            wait_ready(cluster, name, "pull", timeout_seconds=PULL_TIMEOUT_SECONDS)


@pytest.fixture(scope="session")
def served(
    request: pytest.FixtureRequest, cluster: Cluster, release: Release, warm_image: None, durations: Durations
) -> Iterator[Served]:
    """One LLMDeployment that is Ready, with a port forwarded to its Service. One for each process.

    In float32, in which `test_chat.py` compares: `auto` rounds products where a CPU multiplies bfloat16 numbers.
    """
    for namespace in _namespace(request, cluster, "served"):
        with durations.measure("kubectl apply -> Ready"):
            cluster.apply(namespace, llmd(MODEL, engine=FLOAT32_ENGINE))
            wait_ready(cluster, namespace, MODEL)
        with cluster.port_forward(namespace, f"service/{MODEL}", 80) as port:
            yield Served(namespace, MODEL, f"http://127.0.0.1:{port}")
