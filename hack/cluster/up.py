"""`up` in order: what is compiled, built and started, and what may overlap.

    compile:  registry, kind ......... control plane, kubectl, etcd, CoreDNS, helm ..... ┐
    engine:   Docker engine, base image, Debian packages, registry, push of the base ... ┴─ node image, cluster, check

Compiling keeps the cores busy while the other line waits for the network, so both run at once. Every step first looks
whether its result is there: an interrupted `up` goes on where it stopped, a finished one takes seconds.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hack.cluster import (
    base_image,
    docker_engine,
    image_hub,
    kind_cluster,
    node_image,
    paths,
    registry,
    shell,
    smoke,
)
from hack.cluster.errors import ClusterError
from hack.cluster.machine import disk
from hack.cluster.steps import Steps
from hack.cluster.tools import go_tools

# What kind v0.30.0 itself would pull (pkg/apis/config/defaults/image.go of its module).
KIND_NODE_IMAGE = "kindest/node:v1.34.0@sha256:7416a61b42b1662ca6ca89f02028ac133a309a2a30ba309614e8ec94d976dc5a"
# Where debootstrap is not ours to run: the public image closest to millstream-base.
PUBLIC_BASE_IMAGE = "python:3.11-slim-bookworm"
PULL_SECONDS = 600.0


def up(steps: Steps) -> None:
    """Have the cluster, the registry and the tools. Raises ClusterError with the fix."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="compile") as compiler:
        try:
            first = compiler.submit(go_tools.ensure, [go_tools.REGISTRY, go_tools.KIND], steps)
            docker_engine.ensure(steps)
            image = _ready_node_image()
            if not image:
                refuse_full_disk()
                image = _pulled_node_image(steps)
            tools = [go_tools.KUBECTL, go_tools.HELM]
            rest = compiler.submit(go_tools.ensure, tools if image else [*go_tools.NODE_TOOLS, go_tools.HELM], steps)
            if not image:
                node_image.ensure_packages(steps)
            first.result()
            registry.ensure(steps)
            base = base_reference(steps)
            rest.result()
        except BaseException:
            compiler.shutdown(wait=False, cancel_futures=True)
            shell.terminate_all()
            raise
    for tool in (go_tools.KIND, go_tools.KUBECTL, go_tools.HELM):
        go_tools.link(tool)
    kind_cluster.ensure(steps, image or node_image.ensure(steps))
    if not smoke.is_answered():
        smoke.check(base, steps)


def base_reference(steps: Steps) -> str:
    """The image that our own images are built from: millstream-base in our registry, or a public one."""
    if os.geteuid() != 0 and not base_image.newest_made() and image_hub.in_reach():
        return PUBLIC_BASE_IMAGE
    name = base_image.ensure(steps)
    go_tools.ensure([go_tools.REGISTRY], steps)
    registry.ensure(steps)
    return registry.push(name, steps)


def _ready_node_image() -> str:
    """A node image that is already in Docker's store, kind's own first; empty when there is none."""
    return next((image for image in (KIND_NODE_IMAGE, node_image.name()) if docker_engine.has_image(image)), "")


def _pulled_node_image(steps: Steps) -> str:
    """kind's own image if a registry is in reach and gives it; else empty."""
    if not image_hub.in_reach():
        steps.say("no image registry in reach: the node image is built here, from package registries")
        return ""
    try:
        with steps.step("Node image: pull kind's own"):
            shell.run(["docker", "pull", "--quiet", KIND_NODE_IMAGE], timeout_seconds=PULL_SECONDS)
    except ClusterError as error:
        steps.say(f"{error} The node image is built here instead.")
        return ""
    return KIND_NODE_IMAGE


def refuse_full_disk() -> None:
    """Raise ClusterError when the cache or Docker's store is too small for a first build."""
    docker_root = shell.run(["docker", "info", "--format", "{{.DockerRootDir}}"]).strip()
    disk.refuse_full([(paths.cache_folder(), disk.CACHE_BYTES), (Path(docker_root), disk.DOCKER_BYTES)])
