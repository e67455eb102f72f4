"""A Docker engine that answers: the one that runs, or (root on Debian or Ubuntu) one installed and started here.

answers? ── yes ─────────────────────────────┐
   │ no                                      ├─ capability missing? register the runc wrapper, reload (HUP)
install docker.io, start dockerd (systemd    │
where it is PID 1, else detached by hand) ───┘
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hack.cluster import apt, content, paths, runc_wrapper, shell
from hack.cluster.errors import ClusterError
from hack.cluster.steps import Steps

DAEMON_CONFIG = Path("/etc/docker/daemon.json")
WRAPPERS = Path("/usr/local/lib/millstream")
RUNTIME = "millstream-runc"
START_SECONDS = 60.0
PID_FILES = (Path("/var/run/docker.pid"), Path("/var/run/docker/containerd/containerd.pid"))


def daemon_config(existing: dict[str, Any], wrapper: str) -> dict[str, Any]:
    """`daemon.json` with our wrapper as the default runtime; every other setting of the user's stays."""
    runtimes = {**existing.get("runtimes", {}), RUNTIME: {"path": wrapper}}
    return {**existing, "runtimes": runtimes, "default-runtime": RUNTIME}


def ensure(steps: Steps) -> None:
    """Have an engine that answers and can run a privileged container. Raises ClusterError with the fix."""
    if not answers():
        _start(steps)
    missing = runc_wrapper.missing_here()
    if missing and not _wrapper_is_default():
        names = ", ".join(missing)
        steps.say(f"this machine may not give {names}: registering a runc wrapper that leaves it out of containers")
        with steps.step("Docker engine: register the runc wrapper"):
            _write_daemon_config()
            _reload()


def is_installed() -> bool:
    """Whether this machine has Docker's command, or DOCKER_HOST names an engine elsewhere."""
    return bool(os.environ.get("DOCKER_HOST") or shutil.which("docker"))


def answers() -> bool:
    """Whether an engine answers this user now."""
    return shell.succeeds(["docker", "version", "--format", "{{.Server.Version}}"], timeout_seconds=15)


def has_image(reference: str) -> bool:
    """Whether the engine's store holds an image of this name."""
    return shell.succeeds(["docker", "image", "inspect", "--format", "{{.Id}}", reference])


def architecture() -> str:
    """The engine's architecture in image terms: `amd64`, `arm64`."""
    return shell.run(["docker", "version", "--format", "{{.Server.Arch}}"]).strip()


def container_state(name: str) -> str:
    """`running`, `exited`, ... or `` where there is no such container."""
    try:
        return shell.run(["docker", "container", "inspect", "--format", "{{.State.Status}}", name]).strip()
    except ClusterError:
        return ""


def check_access() -> None:
    """Raise ClusterError with the fix where an engine does not answer because it is another machine's, or closed to
    this user."""
    if os.environ.get("DOCKER_HOST"):
        raise ClusterError(f"DOCKER_HOST={os.environ['DOCKER_HOST']} does not answer: start that engine or unset it.")
    socket = Path("/var/run/docker.sock")
    if os.geteuid() != 0 and socket.exists() and not os.access(socket, os.W_OK):
        raise ClusterError(
            f"You may not use the Docker engine ({socket}): add yourself to its group "
            "(`sudo usermod -aG docker $USER`, log in again) or run this as root."
        )


def _start(steps: Steps) -> None:
    check_access()
    if sys.platform != "linux" or os.geteuid() != 0:
        raise ClusterError("No Docker engine answers: install Docker and start it, then run this again.")
    if not shutil.which("dockerd") or not shutil.which("docker"):
        with steps.step("Docker engine: install docker.io"):
            apt.install(["docker.io", "iptables"])
    if runc_wrapper.missing_here():
        _write_daemon_config()
    with steps.step("Docker engine: start dockerd"):
        if Path("/run/systemd/system").is_dir():
            shell.run(["systemctl", "start", "docker"])
        else:
            _start_by_hand()


def _start_by_hand() -> None:
    """Start dockerd detached from this terminal and session, its log in the cache."""
    for pid_file in PID_FILES:
        _forget_dead(pid_file)
    log = paths.subfolder("logs") / "dockerd.log"
    with log.open("ab") as sink:
        process = subprocess.Popen(
            ["dockerd"], stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True, cwd="/"
        )
    deadline = time.monotonic() + START_SECONDS
    while not answers():
        if process.poll() is not None:
            raise ClusterError(f"dockerd stopped at once: {shell.last_words(log.read_text(errors='replace'))} ({log})")
        if time.monotonic() > deadline:
            raise ClusterError(f"dockerd does not answer after {START_SECONDS:g} s; its log is {log}.")
        time.sleep(0.3)


def _forget_dead(pid_file: Path) -> None:
    """Remove a pid file whose process is gone or is another program: after a reboot its number may be taken."""
    try:
        command = Path(f"/proc/{int(pid_file.read_text())}/comm").read_text().strip()
    except (OSError, ValueError):
        command = ""
    if command not in ("dockerd", "containerd"):
        pid_file.unlink(missing_ok=True)


def _wrapper() -> Path:
    """Install the wrapper, started by the interpreter that runs now (not by a virtual environment).

    Not in a user's cache: the engine, which is the machine's, starts it for every container as long as that lives.
    """
    source = Path(runc_wrapper.__file__).read_text()
    script = f"#!{Path(sys.executable).resolve()} -IS\n{source}"
    target = WRAPPERS / f"runc-{content.address_of({'script': script})}"
    if not target.is_file():
        WRAPPERS.mkdir(parents=True, exist_ok=True)
        fresh = target.with_suffix(f".{os.getpid()}")
        fresh.write_text(script)
        fresh.chmod(fresh.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
        fresh.replace(target)
    return target


def _write_daemon_config() -> None:
    if os.geteuid() != 0:
        raise ClusterError(
            "This machine lacks a capability that a kind node needs, and only root may tell Docker to leave it out: "
            "run `sudo python3 -m hack.cluster up` once."
        )
    try:
        existing = json.loads(DAEMON_CONFIG.read_text()) if DAEMON_CONFIG.is_file() else {}
    except json.JSONDecodeError as error:
        raise ClusterError(f"{DAEMON_CONFIG} is not valid JSON ({error}): repair or remove it.") from error
    DAEMON_CONFIG.parent.mkdir(parents=True, exist_ok=True)
    fresh = DAEMON_CONFIG.with_suffix(".millstream")
    fresh.write_text(json.dumps(daemon_config(existing, str(_wrapper())), indent=2) + "\n")
    fresh.replace(DAEMON_CONFIG)


def _reload() -> None:
    """Tell the daemon to read its file again (HUP changes runtimes without touching containers), and wait for it."""
    pids = [pid for pid in shell.run(["pidof", "dockerd"]).split() if pid.isdigit()]
    for pid in pids:
        os.kill(int(pid), signal.SIGHUP)
    deadline = time.monotonic() + 10
    while not _wrapper_is_default():
        if time.monotonic() > deadline:
            raise ClusterError(f"dockerd did not take the runtime from {DAEMON_CONFIG}: restart it and run this again.")
        time.sleep(0.2)


def _wrapper_is_default() -> bool:
    """Whether the daemon runs containers with this very wrapper (not with an older one, or one deleted since)."""
    output = shell.run(
        ["docker", "info", "--format", "[{{json .DefaultRuntime}}, {{json .Runtimes}}]"], timeout_seconds=15
    )
    default, runtimes = json.loads(output)
    return bool(default == RUNTIME and runtimes.get(RUNTIME, {}).get("path") == str(_wrapper()))
