"""The image registry next to the cluster, by kind's documented pattern: one name for both sides.

    host:  docker push localhost:5001/x   -> published port -> container millstream-registry:5000
    node:  containerd pulls localhost:5001/x -> certs.d/localhost:5001/hosts.toml -> http://millstream-registry:5000

The port is 5001 where that is free when the registry is first started (`port`).

The container serves our own build of distribution/registry (no image to pull); its storage is a Docker volume, so
images outlive `down`. `kind load` is not used: it copies a whole image for every changed line.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import time
import urllib.error
import urllib.request

from hack.cluster import content, docker_engine, paths, shell
from hack.cluster.errors import ClusterError
from hack.cluster.image_archive import EMPTY_TMP, Files, ScratchImage
from hack.cluster.steps import Steps
from hack.cluster.tools import go_tools

PORTS = range(5001, 5021)  # the first free one, unless a container has one already or the setting names one
SETTING = "MILLSTREAM_REGISTRY_PORT"
CONTAINER = "millstream-registry"
VOLUME = "millstream-registry"
INNER_PORT = 5000
NETWORK = "kind"

# A proxy in the environment is for the outside world, not for our own loopback.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))

# delete: so that a registry can be pruned; no access log: it would be the largest file in the container.
CONFIG = f"""version: 0.1
log: {{accesslog: {{disabled: true}}, level: warn}}
storage:
  filesystem: {{rootdirectory: /var/lib/registry}}
  delete: {{enabled: true}}
http: {{addr: ":{INNER_PORT}"}}
"""


@functools.cache
def port() -> int:
    """The port on 127.0.0.1: the setting's, else that of the container that exists, else the first free one.

    Raises:
        ClusterError: the setting is no port, or every port of PORTS is taken.
    """
    if wish := os.environ.get(SETTING, "").strip():
        if not (wish.isascii() and wish.isdigit() and 1024 <= int(wish) <= 65535):
            raise ClusterError(f"{SETTING} is {wish[:20]!r}: it must be a port from 1024 to 65535.")
        return int(wish)
    if published := _published_port():
        return published
    free = next((one for one in PORTS if is_free(one)), None)
    if free is None:
        raise ClusterError(
            f"Every port from {PORTS[0]} to {PORTS[-1]} on 127.0.0.1 is taken by another program: name a free one for "
            f"the registry, as in {SETTING}=6000."
        )
    return free


def address() -> str:
    """`localhost:<port>`: the registry's name on this machine and in the names of images."""
    return f"localhost:{port()}"


def hosts_toml() -> str:
    """containerd's `certs.d/localhost:<port>/hosts.toml`: the node reaches the registry by its container's name."""
    return f'[host."http://{CONTAINER}:{INNER_PORT}"]\n'


def hosting_config_map() -> dict[str, object]:
    """The ConfigMap that names the cluster's registry to tools (KEP-1755), as kind documents it."""
    document = f'host: "{address()}"\nhelp: "docs/local-cluster.md"\n'
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "local-registry-hosting", "namespace": "kube-public"},
        "data": {"localRegistryHosting.v1": document},
    }


def ensure(steps: Steps) -> None:
    """Have the registry answer on the host. Starts a stopped container, replaces one of an older build."""
    go_tools.ensure([go_tools.REGISTRY], steps)
    image = _image_name()
    if not docker_engine.has_image(image):
        _make_image(image)
    same = _image_of_container() == image and _published_port() == port()
    if same and docker_engine.container_state(CONTAINER) == "running" and answers():
        return
    with steps.step(f"Registry: start at {address()}"):
        if docker_engine.container_state(CONTAINER):
            shell.run(["docker", "rm", "--force", CONTAINER])
        refuse_busy_port()
        publish = f"127.0.0.1:{port()}:{INNER_PORT}"
        options = ["--detach", "--restart=always", "--publish", publish, "--volume", f"{VOLUME}:/var/lib/registry"]
        shell.run(["docker", "run", *options, "--name", CONTAINER, image])
        _wait()


def answers() -> bool:
    """Whether the API answers with its own body and header (any proxy may accept a connection)."""
    try:
        with _direct.open(f"http://127.0.0.1:{port()}/v2/", timeout=3) as response:
            speaks = response.headers.get("Docker-Distribution-Api-Version")
            return bool(speaks == "registry/2.0" and response.read(64).strip() == b"{}")
    except (OSError, urllib.error.URLError):
        return False


def has(repository: str, tag: str) -> bool:
    """Whether the registry holds `repository:tag`."""
    accept = "application/vnd.docker.distribution.manifest.v2+json, application/vnd.oci.image.manifest.v1+json"
    request = urllib.request.Request(
        f"http://127.0.0.1:{port()}/v2/{repository}/manifests/{tag}", headers={"Accept": accept}
    )
    try:
        with _direct.open(request, timeout=5) as response:
            return "layers" in json.load(response)
    except (OSError, urllib.error.URLError, json.JSONDecodeError):
        return False


def push(local_name: str, steps: Steps) -> str:
    """Push an image of Docker's store under our registry's name unless it is there; returns the full reference."""
    repository, tag = local_name.split(":")
    reference = f"{address()}/{local_name}"
    if not has(repository, tag):
        with steps.step(f"Registry: push {local_name}"):
            shell.run(["docker", "tag", local_name, reference])
            shell.run(["docker", "push", "--quiet", reference])
    return reference


def join_cluster_network() -> None:
    """Give the registry its name in the node's network; nothing to do when it is already there."""
    networks = shell.run(["docker", "inspect", "--format", "{{json .NetworkSettings.Networks}}", CONTAINER])
    if NETWORK not in json.loads(networks):
        shell.run(["docker", "network", "connect", NETWORK, CONTAINER])


def remove(*, with_images: bool) -> None:
    """Delete the container, and the stored images too when asked."""
    if docker_engine.container_state(CONTAINER):
        shell.run(["docker", "rm", "--force", CONTAINER])
    if with_images and shell.succeeds(["docker", "volume", "inspect", VOLUME]):
        shell.run(["docker", "volume", "rm", VOLUME])


def _image_name() -> str:
    return f"{CONTAINER}:{content.address_of({'binary': go_tools.REGISTRY.address(), 'config': CONFIG})}"


def _make_image(reference: str) -> None:
    files: Files = {
        "/usr/local/bin/registry": go_tools.REGISTRY.binary(),
        "/etc/distribution/config.yml": CONFIG.encode(),
        **EMPTY_TMP,
    }
    entrypoint = ["/usr/local/bin/registry", "serve", "/etc/distribution/config.yml"]
    image = ScratchImage(reference, files, entrypoint, architecture=docker_engine.architecture())
    archive = paths.subfolder("tmp") / "registry-image.tar"
    try:
        image.write(archive)
        shell.run(["docker", "load", "--quiet", "--input", archive])
    finally:
        archive.unlink(missing_ok=True)


def _image_of_container() -> str:
    try:
        return shell.run(["docker", "container", "inspect", "--format", "{{.Config.Image}}", CONTAINER]).strip()
    except ClusterError:
        return ""


def refuse_busy_port() -> None:
    """Raise ClusterError when another program listens on our port; Docker's own message names neither."""
    if not is_free(port()):
        raise ClusterError(
            f"Port {port()} on 127.0.0.1 is taken by another program: stop it, or name a free port for the registry, "
            f"as in {SETTING}=6000."
        )


def is_free(number: int) -> bool:
    """Whether a program could listen on the port of 127.0.0.1 now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", number))
        except OSError:
            return False
    return True


def _published_port() -> int:
    """The port of the container that exists, running or not; 0 where there is none."""
    template = "{{json .HostConfig.PortBindings}}"
    try:
        bindings = json.loads(shell.run(["docker", "container", "inspect", "--format", template, CONTAINER])) or {}
        return int(bindings[f"{INNER_PORT}/tcp"][0]["HostPort"])
    except (ClusterError, LookupError, ValueError):
        return 0


def _wait() -> None:
    deadline = time.monotonic() + 20
    while not answers():
        if time.monotonic() > deadline:
            said = shell.last_words(shell.run(["docker", "logs", "--tail", "5", CONTAINER]))
            raise ClusterError(f"The registry at {address()} does not answer: {said}")
        time.sleep(0.2)
