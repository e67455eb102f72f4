"""The programs of the control plane without a node: from the pins of `hack/cluster/go`, built once a machine."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from hack.cluster.lock import only_one
from hack.cluster.steps import Steps
from hack.cluster.tools import go_tools


@dataclass(frozen=True, slots=True)
class Tools:
    """Paths of the programs."""

    etcd: Path
    api_server: Path
    controller_manager: Path
    scheduler: Path
    kwok: Path
    openssl: Path


def ensure(steps: Steps) -> Tools:
    """Have them all. Raises ClusterError when one cannot be built, FileNotFoundError when openssl is missing."""
    plane = go_tools.CONTROL_PLANE if go_tools.CONTROL_PLANE.is_built() else go_tools.BARE_CONTROL_PLANE
    wanted = [go_tools.ETCD, plane, go_tools.KWOK]
    if not all(tool.is_built() for tool in wanted):
        with only_one(steps.say):
            go_tools.ensure(wanted, steps)
    openssl = shutil.which("openssl")
    if openssl is None:
        raise FileNotFoundError("openssl is not installed; it makes the key of the test API server's tokens.")
    return Tools(
        etcd=go_tools.ETCD.binary(),
        api_server=plane.binary("kube-apiserver"),
        controller_manager=plane.binary("kube-controller-manager"),
        scheduler=plane.binary("kube-scheduler"),
        kwok=go_tools.KWOK.binary(),
        openssl=Path(openssl),
    )
