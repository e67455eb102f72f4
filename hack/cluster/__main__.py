"""`python3 -m hack.cluster up | down | status | tools NAME… | base-image | registry`: see `--help`.

Standard library only, so that it runs before anything is installed. `docs/local-cluster.md` is for users.

    up                                          the steps in order
    machine                                     whether this machine can carry it, and its disk
    docker_engine, runc_wrapper, apt            a Docker engine that can run a privileged container
    tools                                       pinned tools, compiled or installed once per machine
    base_image, security_updates                the image below ours, and when Debian's updates make it anew
    node_image, image_archive                   images without an image registry
    registry, image_hub                         the cluster's registry; whether a public one is reachable
    kind_config, kind_cluster, smoke            the cluster: configuration, lifecycle, smoke test
    content, paths, lock, shell, steps, errors  shared helpers
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
from types import FrameType

from hack.cluster import docker_engine, kind_cluster, kind_config, paths, registry, shell
from hack.cluster import up as up_module
from hack.cluster.errors import ClusterError
from hack.cluster.lock import only_one
from hack.cluster.steps import Steps
from hack.cluster.tools import go_tools, uv_tool


def main(arguments: list[str] | None = None) -> int:
    """Run one command. Return the exit status: 0, 1 with one sentence on stderr, or 130 when interrupted."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    # base-image and registry print one word on stdout for scripts, so all other output goes to stderr
    steps = Steps(out=sys.stderr if options.command in ("base-image", "registry") else sys.stdout)
    try:
        if options.command == "status":
            return _status(steps)
        if options.command == "registry":
            print(registry.address())
            return 0
        with only_one(steps.say):
            _COMMANDS[options.command](options, steps)
    except ClusterError as error:
        steps.close()
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        steps.close()
        print("cluster: interrupted; run the same command again to continue.", file=sys.stderr)
        return 130
    finally:
        steps.close()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python3 -m hack.cluster", description="A real local Kubernetes cluster.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser("up", help="engine, registry, cluster: reused when healthy, repaired or recreated when not")
    down = commands.add_parser("down", help="delete the cluster; images and caches stay")
    down.add_argument(
        "--all", action="store_true", help="also delete the registry's images, our Docker images, the tools"
    )
    commands.add_parser("status", help="what runs; exit status 0 when the cluster is healthy")
    tools = commands.add_parser("tools", help="have tools in .tools/bin")
    tools.add_argument(
        "names",
        nargs="+",
        choices=["uv", *go_tools.USER_TOOLS],
        metavar="name",
        help="uv and the tools of Go modules",
    )
    commands.add_parser("registry", help="print the address of the registry that images are pushed to")
    commands.add_parser("base-image", help="print the image that our images are built from, making it if need be")
    return parser


def _up(_: argparse.Namespace, steps: Steps) -> None:
    up_module.up(steps)
    print("\nWhere the time went:\n" + steps.table())
    print(f"\nThe cluster is up: `export KUBECONFIG={paths.KUBECONFIG}`, registry {registry.address()}.")


def _down(options: argparse.Namespace, steps: Steps) -> None:
    if not docker_engine.is_installed():
        steps.say("Docker is not installed, so there is no cluster, registry or image to delete.")
        paths.KUBECONFIG.unlink(missing_ok=True)
    else:
        _delete_from_engine(steps, with_images=options.all)
    if options.all:
        with steps.step("Delete the tools"):
            shutil.rmtree(paths.subfolder("tools"))


def _delete_from_engine(steps: Steps, *, with_images: bool) -> None:
    """Delete the cluster and the registry. A stopped engine keeps them, so it has to answer."""
    if not docker_engine.answers():
        docker_engine.check_access()
        raise ClusterError(
            "The Docker engine does not answer, and a stopped engine keeps the cluster: start Docker (`systemctl start "
            "docker`), then run this again."
        )
    kind_cluster.delete(steps)
    registry.remove(with_images=with_images)
    if not with_images:
        return
    with steps.step("Delete our Docker images"):
        listed = shell.run(["docker", "images", "--format", "{{.Repository}}:{{.Tag}}"]).split()
        ours = [image for image in listed if image.removeprefix(f"{registry.address()}/").startswith("millstream-")]
        if ours:
            shell.run(["docker", "rmi", "--force", *ours])


def _status(steps: Steps) -> int:
    engine = docker_engine.answers()
    state = docker_engine.container_state(kind_config.NODE) if engine else ""
    left = (
        kind_cluster.problems()
        if state == "running" and go_tools.KUBECTL.is_built() and paths.KUBECONFIG.is_file()
        else []
    )
    healthy = state == "running" and not left and registry.answers()
    steps.say(f"Docker engine: {'answers' if engine else 'does not answer'}")
    steps.say(f"registry {registry.address()}: {'answers' if registry.answers() else 'does not answer'}")
    steps.say(f"cluster {kind_config.CLUSTER}: {state or 'absent'}{''.join(f'; {problem}' for problem in left)}")
    steps.say("healthy" if healthy else "not healthy: `python3 -m hack.cluster up` makes it so")
    return 0 if healthy else 1


def _tools(options: argparse.Namespace, steps: Steps) -> None:
    for name in options.names:
        if name == "uv":
            uv_tool.ensure(steps)
        else:
            go_tools.ensure([go_tools.USER_TOOLS[name]], steps)
            go_tools.link(go_tools.USER_TOOLS[name])


def _base_image(_: argparse.Namespace, steps: Steps) -> None:
    docker_engine.ensure(steps)
    print(up_module.base_reference(steps))


_COMMANDS = {"up": _up, "down": _down, "tools": _tools, "base-image": _base_image}


def _interrupt(_: int, __: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
