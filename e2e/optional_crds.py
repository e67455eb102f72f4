"""The CRDs of KEDA and of the Prometheus operator, from the Go modules of their releases (pinned in e2e/crds/go.sum).

Only the kinds come, not the programs: what is tested is that their schemas take what we make, and that we see them come
and go. The real schemas are half the point; a stand-in would take anything.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from e2e.cluster import Cluster, Object
from e2e.shared_things import LEFTOVER_LABEL, LEFTOVER_VALUE
from hack.cluster.steps import Steps
from hack.cluster.tools import go_toolchain

MODULES = Path(__file__).resolve().parent / "crds"
KEDA = "github.com/kedacore/keda/v2@v2.21.0"
PROMETHEUS = "github.com/prometheus-operator/prometheus-operator@v0.85.0"
FILES = {
    "scaledobjects.keda.sh": (KEDA, "config/crd/bases/keda.sh_scaledobjects.yaml"),
    "podmonitors.monitoring.coreos.com": (
        PROMETHEUS,
        "example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml",
    ),
    "prometheusrules.monitoring.coreos.com": (
        PROMETHEUS,
        "example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml",
    ),
}


def crd(name: str) -> Object:
    """A CRD by its name, as its project published it."""
    module, path = FILES[name]
    go = go_toolchain.find(Steps())
    command = [str(go), "mod", "download", "-json", module]
    done = subprocess.run(command, cwd=MODULES, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (Path(json.loads(done.stdout)["Dir"]) / path).read_text(encoding="utf-8")
    found: Object = yaml.safe_load(text)
    assert found["metadata"]["name"] == name
    return found


def install(cluster: Cluster, name: str) -> None:
    """Server-side, since they are too large for kubectl's annotation."""
    manifest = crd(name)
    manifest["metadata"].setdefault("labels", {})[LEFTOVER_LABEL] = LEFTOVER_VALUE
    cluster.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(manifest))
    cluster.wait_condition("crd", name, "Established")


def remove(cluster: Cluster, name: str) -> None:
    """The kind goes, and every object of it."""
    cluster.kubectl("delete", "crd", name, "--ignore-not-found", "--timeout=60s")


@contextmanager
def optional_crds(cluster: Cluster) -> Iterator[None]:
    """All of them, for the length of the block; a cluster that has one already is not touched."""
    there = [name for name in FILES if cluster.find("crd", name) is not None]
    assert not there, f"this cluster has {', '.join(there)} already; they would be deleted with the test"
    try:
        for name in FILES:
            install(cluster, name)
        yield
    finally:
        for name in FILES:
            remove(cluster, name)
