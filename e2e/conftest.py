"""Options and shared fixtures of the end-to-end tests."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster import Cluster, refusal_of
from e2e.deployments import MODEL, PULL_TIMEOUT_SECONDS, Served, llmd, wait_ready
from e2e.durations import Durations
from e2e.release import Release
from hack.cluster.kind_config import without_proxy

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / ".tools"
_DURATIONS = pytest.StashKey[Durations]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("e2e")
    group.addoption("--kubeconfig", type=Path, default=TOOLS / "kubeconfig", help="cluster to test against")
    group.addoption("--images", type=Path, default=TOOLS / "images.json", help='{"operator": ref, "runtime": ref}')
    group.addoption("--long", action="store_true", help="run the tests that take minutes each, too")
    group.addoption("--keep-namespaces", action="store_true", help="leave the tests' namespaces for a look at them")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_DURATIONS] = Durations()
    os.environ.update(without_proxy(os.environ))  # forwarded ports are on 127.0.0.1


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("long") is not None and not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="takes minutes: `make e2e-long`"))
        item.add_marker(pytest.mark.e2e)
        item.add_marker(pytest.mark.flaky(reruns=1))  # as in tests/conftest.py
        if item.get_closest_marker("timeout") is None:  # the first test of a run also waits for the pull
            item.add_marker(pytest.mark.timeout(PULL_TIMEOUT_SECONDS + 300))
    items.sort(key=lambda item: item.path.name == "test_uninstall.py")  # it takes everybody's models away: last


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    durations = config.stash[_DURATIONS]
    if not durations.seconds:
        return
    terminalreporter.section("measured")
    for name, seconds in durations.seconds.items():
        terminalreporter.write_line(f"{seconds:7.1f} s  {name}")
    durations.write(TOOLS / "e2e-durations.json")


@pytest.fixture(scope="session")
def durations(request: pytest.FixtureRequest) -> Durations:
    """Where tests put what they measured."""
    return request.config.stash[_DURATIONS]


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Cluster:
    """The cluster under test."""
    kubeconfig: Path = request.config.getoption("--kubeconfig")
    if not kubeconfig.is_file():
        pytest.exit(f"{kubeconfig} is missing: run `make cluster-up`, or give --kubeconfig.", returncode=1)
    found = Cluster(kubeconfig.resolve(), TOOLS / "bin")
    if refusal := refusal_of(found):
        pytest.exit(f"{kubeconfig}: {refusal}", returncode=1)
    return found


@pytest.fixture(scope="session")
def release(request: pytest.FixtureRequest, cluster: Cluster, durations: Durations) -> Release:
    """The operator of this checkout, running."""
    path: Path = request.config.getoption("--images")
    if not path.is_file():
        pytest.exit(f"{path} is missing: run `make images`, or give --images.", returncode=1)
    images = json.loads(path.read_text())
    release = Release(cluster, images["operator"], images["runtime"])
    try:
        with durations.measure("helm upgrade --install"):
            release.install()
    except AssertionError as error:  # every test would wait for it and fail
        pytest.exit(f"The operator does not start.\n{error}\n{release.logs()}", returncode=1)
    return release


@pytest.fixture
def namespace(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[str]:
    """A namespace for one test, which admits restricted pods only."""
    yield from _namespace(request, cluster, request.node.name)


def _namespace(request: pytest.FixtureRequest, cluster: Cluster, wish: str) -> Iterator[str]:
    words = re.sub(r"[^a-z0-9]+", "-", wish.lower().removeprefix("test_"))[:40].strip("-")
    name = f"e2e-{words}-{secrets.token_hex(2)}"
    cluster.kubectl("create", "namespace", name)
    cluster.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    yield name
    if not request.config.getoption("--keep-namespaces"):
        cluster.kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")


@pytest.fixture(scope="session")
def warm_image(request: pytest.FixtureRequest, cluster: Cluster, release: Release, durations: Durations) -> None:
    """The runtime image on the node, so that no test measures a pull."""
    for name in _namespace(request, cluster, "pull"):
        with durations.measure("first LLMDeployment Ready (image pull included)"):
            cluster.apply(name, llmd("pull"))
            wait_ready(cluster, name, "pull", timeout_seconds=PULL_TIMEOUT_SECONDS)


@pytest.fixture(scope="session")
def served(
    request: pytest.FixtureRequest, cluster: Cluster, release: Release, warm_image: None, durations: Durations
) -> Iterator[Served]:
    """One LLMDeployment that is Ready, with a port forwarded to its Service."""
    for namespace in _namespace(request, cluster, "served"):
        with durations.measure("kubectl apply -> Ready"):
            cluster.apply(namespace, llmd(MODEL))
            wait_ready(cluster, namespace, MODEL)
        with cluster.port_forward(namespace, f"service/{MODEL}", 80) as port:
            yield Served(namespace, MODEL, f"http://127.0.0.1:{port}")
