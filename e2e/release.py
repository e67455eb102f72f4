"""The operator under test: what every test may read of it, and what only a test that runs alone may do to it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import Cluster, Object, eventually
from e2e.shared_things import RELEASE_NAMESPACE
from hack.demo.pending_release import forget_pending

REPLICAS = 2  # the chart's default
CHART = Path(__file__).resolve().parent.parent / "charts" / "millstream"
# No test waits half a minute for a look of the operator's. `test_changes.py` runs one release with the chart's own.
SHORT_INTERVALS = ("operator.recheckSeconds=2", "operator.discoverySeconds=5")
CHART_INTERVALS = ()


@dataclass(frozen=True, slots=True)
class Release:
    """One helm release of the chart, to be read."""

    cluster: Cluster
    operator_image: str
    runtime_image: str
    name: str = "millstream"
    namespace: str = RELEASE_NAMESPACE

    def image_flags(self) -> list[str]:
        """helm's flags for the images under test."""
        images = (f"operator.image={self.operator_image}", f"runtime.image={self.runtime_image}")
        return [word for image in images for word in ("--set", image)]

    def logs(self) -> str:
        """The last lines of each operator pod's log, of its last crash too."""
        selector = f"app.kubernetes.io/instance={self.name},app.kubernetes.io/component=operator"
        logs = ["logs", "-n", self.namespace, "-l", selector, "--prefix", "--tail=20"]
        said = [self.cluster.run("kubectl", *logs, *more, check=False).stdout for more in ((), ("--previous",))]
        return "".join(said)

    def chart_version(self) -> str:
        """Of the chart that is installed now."""
        found = self.cluster.run("helm", "list", "--namespace", self.namespace, "-o", "json").stdout
        chart = next(one["chart"] for one in json.loads(found) if one["name"] == self.name)
        return str(chart).removeprefix("millstream-")

    def pods(self) -> list[Object]:
        """The operator's pods."""
        selector = f"app.kubernetes.io/instance={self.name},app.kubernetes.io/component=operator"
        return self.cluster.items("pods", "-n", self.namespace, "-l", selector)


@dataclass(frozen=True, slots=True)
class ManagedRelease(Release):
    """The same, to be changed: the fixture `managed_release` gives it to tests that run alone."""

    def install(self, *values: str, chart: Path = CHART, intervals: Sequence[str] = SHORT_INTERVALS) -> None:
        """Install, or upgrade to exactly these values, and wait until the operator runs."""
        sets = [word for value in (*intervals, *values) for word in ("--set", value)]
        place = ["--namespace", self.namespace, "--create-namespace"]
        wait = ["--wait", "--timeout", "180s"]
        command = ["helm", "upgrade", "--install", self.name, str(chart), *place, *wait]
        self.cluster.run(*forget_pending(self.name, self.namespace))  # of a run that was interrupted
        self.cluster.run(*command, *self.image_flags(), *sets)

    def rollback(self) -> None:
        """Back to the release before, and wait until the operator runs."""
        wait = ["--wait", "--timeout", "180s"]
        self.cluster.run("helm", "rollback", self.name, "--namespace", self.namespace, *wait)

    def uninstall(self) -> None:
        """Remove the release, and wait until its objects are gone."""
        self.cluster.run("helm", "uninstall", self.name, "--namespace", self.namespace, "--wait", "--timeout", "120s")
        eventually(self.pods, lambda found: not found, what="no operator")

    def kill(self) -> None:
        """End the operator without a chance to say goodbye."""
        names = [pod["metadata"]["name"] for pod in self.pods()]
        self.cluster.kubectl("delete", "pod", "-n", self.namespace, *names, "--force", "--grace-period=0")

    def scale(self, replicas: int) -> None:
        """Run so many operators, and wait until that is so."""
        self.cluster.kubectl("scale", f"deployment/{self.name}", "-n", self.namespace, f"--replicas={replicas}")
        eventually(
            self.pods,
            lambda found: len(found) == replicas and all(_is_ready(pod) for pod in found),
            what=f"{replicas} operators",
        )


def _is_ready(pod: Object) -> bool:
    statuses = pod.get("status", {}).get("containerStatuses") or [{}]
    return all(item.get("ready") for item in statuses)
