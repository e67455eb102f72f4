"""The cluster itself: create, look at, repair, delete.

absent ──> create ──> healthy <── start the container, wait ── stopped (the engine was restarted)
             ^                                                     │ still not healthy
             └──────────────── delete <───────────────────────────┘
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from hack.cluster import docker_engine, kind_config, paths, registry, runc_wrapper, shell
from hack.cluster.errors import ClusterError
from hack.cluster.kind_config import CLUSTER, NODE
from hack.cluster.steps import Steps
from hack.cluster.tools import go_tools

READY_SECONDS = 120.0


def machine() -> kind_config.Machine:
    """The facts of this host, as the Docker engine sees it (it may be a virtual machine's)."""
    version = shell.run(["docker", "info", "--format", "{{.CgroupVersion}}"]).strip()
    return kind_config.Machine(
        cgroup_version=1 if version == "1" else 2,
        lowers_oom_score="CAP_SYS_RESOURCE" not in runc_wrapper.missing_here(),
    )


def exists() -> bool:
    """Whether the node's container is there, running or not."""
    return bool(docker_engine.container_state(NODE))


def started_at() -> str:
    """When the node's container last started, as the engine says it."""
    return shell.run(["docker", "container", "inspect", "--format", "{{.State.StartedAt}}", NODE]).strip()


def ensure(steps: Steps, image: str) -> None:
    """Have a healthy cluster whose node runs `image`."""
    if exists() and _image_of_node() != image:
        steps.say("the node image has changed: the cluster is recreated")
        delete(steps)
    if exists():
        if _is_healthy() or _repaired(steps):
            return
        delete(steps)
    _create(steps, image)


def _is_healthy() -> bool:
    try:
        _write_kubeconfig()
        registry.join_cluster_network()
        _tell_about_registry()
    except ClusterError:  # a container that is stopped, or that the engine cannot reach into
        return False
    return not problems()


def _repaired(steps: Steps) -> bool:
    try:
        with steps.step("Cluster: start it again"):
            shell.run(["docker", "start", NODE])  # does nothing where it runs and is only not healthy yet
            _write_kubeconfig()
            registry.join_cluster_network()
            _wait_until_healthy()
            _tell_about_registry()
    except ClusterError as error:
        steps.say(f"it could not be repaired ({error}) and is recreated")
        return False
    return True


def _create(steps: Steps, image: str) -> None:
    # kind would else write into the user's kubeconfig, and make this cluster their current context.
    options = [f"--kubeconfig={_own_kubeconfig()}", "--config=-", f"--image={image}", "--wait=120s", "--retain"]
    config = kind_config.render(machine())
    direct = kind_config.without_proxy(os.environ, registry.CONTAINER)
    try:
        with steps.step("Cluster: kind create"):
            command: list[str | Path] = [go_tools.KIND.binary(), "create", "cluster", *options, "--verbosity=1"]
            shell.run(command, stdin=config, env=direct, log="kind-create")
        with steps.step("Cluster: system pods Ready"):
            _write_kubeconfig()
            registry.join_cluster_network()
            _wait_until_healthy()
            _tell_about_registry()
    except BaseException:
        if exists():  # a half-made cluster must not be met by the next run; its logs are worth keeping
            logs = paths.subfolder("logs") / "kind"
            shell.succeeds([go_tools.KIND.binary(), "export", "logs", f"--name={CLUSTER}", logs], timeout_seconds=60)
            delete(steps)
        raise


def delete(steps: Steps) -> None:
    """Delete the cluster and the checkout's kubeconfig; nothing to do where there is none."""
    if not exists():
        return
    with steps.step("Cluster: delete"):
        if go_tools.KIND.is_built():
            options = [f"--name={CLUSTER}", f"--kubeconfig={_own_kubeconfig()}"]
            shell.run([go_tools.KIND.binary(), "delete", "cluster", *options])
        else:  # the cache is gone: kind's delete is this and the kubeconfig entries
            shell.run(["docker", "rm", "--force", "--volumes", NODE])
        paths.KUBECONFIG.unlink(missing_ok=True)


def kubectl(*arguments: str, stdin: str | None = None, timeout_seconds: float = 60) -> str:
    """Run our kubectl against this cluster and return its output."""
    command: list[str | Path] = [go_tools.KUBECTL.binary(), f"--kubeconfig={paths.KUBECONFIG}", *arguments]
    return shell.run(command, stdin=stdin, timeout_seconds=timeout_seconds)


def problems() -> list[str]:
    """What keeps the cluster from being healthy, in words; empty when it is."""
    try:
        if kubectl("get", "--raw=/readyz", "--request-timeout=5s", timeout_seconds=15).strip() != "ok":
            return ["the API server is not ready"]
        nodes = json.loads(kubectl("get", "nodes", "--output=json", "--request-timeout=5s"))["items"]
        pods = json.loads(kubectl("get", "pods", "--namespace=kube-system", "--output=json", "--request-timeout=5s"))[
            "items"
        ]
    except ClusterError as error:
        return [str(error)]
    return not_ready("node", nodes) + not_ready("pod", pods)


def not_ready(kind: str, objects: list[dict[str, object]]) -> list[str]:
    """`node x is not Ready` for each object without a true Ready condition; and a word where there is no object."""
    if not objects:
        return [f"there is no {kind}"]
    names = []
    for item in objects:
        status, metadata = item.get("status"), item.get("metadata")
        conditions = (status.get("conditions") or []) if isinstance(status, dict) else []
        ready = any(condition.get("type") == "Ready" and condition.get("status") == "True" for condition in conditions)
        if not ready:
            names.append(f"{kind} {metadata.get('name') if isinstance(metadata, dict) else '?'} is not Ready")
    return names


def _wait_until_healthy() -> None:
    deadline = time.monotonic() + READY_SECONDS
    while left := problems():
        if time.monotonic() > deadline:
            raise ClusterError(f"After {READY_SECONDS:g} s the cluster is still not healthy: {'; '.join(left[:3])}.")
        time.sleep(1)


def _write_kubeconfig() -> None:
    """Write the checkout's own file, private to the user. The user's kubeconfig and context stay as they are."""
    config = shell.run([go_tools.KIND.binary(), "get", "kubeconfig", f"--name={CLUSTER}"])
    _own_kubeconfig()
    fresh = paths.KUBECONFIG.with_suffix(f".{os.getpid()}")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as sink:
        sink.write(config)
    fresh.replace(paths.KUBECONFIG)


def _own_kubeconfig() -> Path:
    paths.TOOLS.mkdir(parents=True, exist_ok=True)
    return paths.KUBECONFIG


def _tell_about_registry() -> None:
    """The node learns where the registry's address leads, which another port changes; the cluster, what it is for."""
    folder = f"/etc/containerd/certs.d/{registry.address()}"
    shell.run(["docker", "exec", NODE, "mkdir", "-p", folder])
    hosts = ["docker", "exec", "--interactive", NODE, "cp", "/dev/stdin", f"{folder}/hosts.toml"]
    shell.run(hosts, stdin=registry.hosts_toml())
    objects = [registry.hosting_config_map(), kind_config.marker()]
    kubectl("apply", "--filename=-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))


def _image_of_node() -> str:
    return shell.run(["docker", "container", "inspect", "--format", "{{.Config.Image}}", NODE]).strip()
