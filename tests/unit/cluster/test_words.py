"""What the user reads: one sentence for each thing that is missing, seconds that can be read, tables that add up."""

from __future__ import annotations

import io
import json
import socket
import sys
from email.message import Message
from pathlib import Path

import pytest

from hack.cluster import apt, docker_engine, paths, registry, shell, smoke
from hack.cluster.__main__ import main
from hack.cluster.docker_engine import daemon_config
from hack.cluster.errors import ClusterError
from hack.cluster.image_hub import is_registry
from hack.cluster.kind_cluster import not_ready
from hack.cluster.steps import Steps, seconds_text


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (9.9, "9.9 s"), (9.96, "10 s"), (119, "119 s"), (185, "3 min 05 s")]
)
def test_seconds(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_steps_print_as_they_go_and_sum_up() -> None:
    out = io.StringIO()
    steps = Steps(out=out)
    with steps.step("one"):
        pass
    with pytest.raises(ClusterError), steps.step("two"):
        raise ClusterError("no")
    assert "✓ one" in out.getvalue()
    assert "✗ two" in out.getvalue()
    assert [step.title for step in steps.finished] == ["one"]


def test_a_program_that_is_missing_is_named() -> None:
    with pytest.raises(ClusterError, match="`no-such-program` is not installed"):
        shell.run(["no-such-program"])


def test_a_failure_says_its_last_words_and_where_the_rest_is() -> None:
    script = "print('much'); print('disk full'); raise SystemExit(3)"
    with pytest.raises(ClusterError, match=r"exit code 3: disk full \(all of it: .*/failing.log\)"):
        shell.run([sys.executable, "-c", script], log="failing")


def test_a_program_that_hangs_is_ended() -> None:
    with pytest.raises(ClusterError, match=r"did not finish within 0\.2 s"):
        shell.run([sys.executable, "-c", "import time; time.sleep(60)"], timeout_seconds=0.2)


def test_without_an_engine_a_user_is_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(docker_engine, "answers", lambda: False)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    assert main(["base-image"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.strip().endswith("install Docker and start it, then run this again.") or "add yourself" in said.err
    assert "Traceback" not in said.err


def test_down_without_docker_says_that_nothing_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.touch()
    monkeypatch.setattr(paths, "KUBECONFIG", kubeconfig)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    assert main(["down", "--all"]) == 0
    assert "Docker is not installed, so there is no cluster" in capsys.readouterr().out
    assert not kubeconfig.exists(), "it names a cluster that is gone"


def test_down_with_a_stopped_engine_fails_and_names_the_fix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stopped engine keeps the cluster's container: nothing was deleted."""
    monkeypatch.setattr(docker_engine, "is_installed", lambda: True)
    monkeypatch.setattr(docker_engine, "answers", lambda: False)
    monkeypatch.setattr(docker_engine, "check_access", lambda: None)
    assert main(["down"]) == 1
    assert capsys.readouterr().err.strip().endswith("start Docker (`systemctl start docker`), then run this again.")


def test_a_remote_engine_that_is_silent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker_engine, "answers", lambda: False)
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    with pytest.raises(ClusterError, match=r"DOCKER_HOST=tcp://127\.0\.0\.1:1 does not answer"):
        docker_engine.ensure(Steps(out=io.StringIO()))


def test_the_users_daemon_settings_stay() -> None:
    mine = {"data-root": "/data", "runtimes": {"nvidia": {"path": "n"}}}
    merged = daemon_config(mine, "/w")
    assert merged["data-root"] == "/data"
    assert merged["runtimes"] == {"nvidia": {"path": "n"}, "millstream-runc": {"path": "/w"}}
    assert merged["default-runtime"] == "millstream-runc"
    assert daemon_config(merged, "/w") == merged


def test_packages_are_not_installed_elsewhere_than_debian_as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match="Please install `debootstrap`"):
        apt.install(["debootstrap"])


def test_ubuntu_is_of_debians_family() -> None:
    assert "debian" in apt.family('ID=ubuntu\nID_LIKE="debian"\n')
    assert "debian" not in apt.family('ID="fedora"\nID_LIKE="rhel"\n')


def headers(**fields: str) -> Message:
    message = Message()
    for name, value in fields.items():
        message[name.replace("_", "-")] = value
    return message


def test_only_a_registry_is_believed_to_be_one() -> None:
    assert is_registry(401, headers(Docker_Distribution_Api_Version="registry/2.0"))
    assert not is_registry(200, headers(Content_Type="text/html"))
    assert not is_registry(403, headers(Docker_Distribution_Api_Version="registry/2.0"))


def test_a_busy_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv(registry.SETTING, str(taken.getsockname()[1]))
        registry.port.cache_clear()
        with pytest.raises(
            ClusterError, match=f"Port {taken.getsockname()[1]} on 127.0.0.1 is taken.*{registry.SETTING}"
        ):
            registry.refuse_busy_port()
    registry.port.cache_clear()


def test_the_node_is_sent_to_the_registry_by_its_containers_name() -> None:
    assert registry.hosts_toml() == '[host."http://millstream-registry:5000"]\n'
    hosting = registry.hosting_config_map()["data"]
    assert f'host: "{registry.address()}"' in hosting["localRegistryHosting.v1"]  # type: ignore[index]


def test_readiness_is_read_from_conditions() -> None:
    ready = {"metadata": {"name": "a"}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    pending = {"metadata": {"name": "b"}, "status": {"conditions": [{"type": "Ready", "status": "False"}]}}
    assert not_ready("pod", [ready]) == []
    assert not_ready("pod", [ready, pending, {"metadata": {"name": "c"}}]) == [
        "pod b is not Ready",
        "pod c is not Ready",
    ]
    assert not_ready("node", []) == ["there is no node"]


def test_the_check_asks_through_a_service_with_several_endpoints() -> None:
    by_kind = {item["kind"]: item for item in smoke.objects("image:1")}
    assert by_kind["Deployment"]["spec"]["replicas"] >= 2
    served = by_kind["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert by_kind["Service"]["spec"]["selector"] == served
    asking = by_kind["Job"]["spec"]["template"]["spec"]["containers"][0]["command"][2]
    assert f"http://{by_kind['Service']['metadata']['name']}.{smoke.NAMESPACE}.svc" in asking
    compile(asking, "client", "exec")
    compile(by_kind["Deployment"]["spec"]["template"]["spec"]["containers"][0]["command"][2], "server", "exec")
    assert json.loads(json.dumps(by_kind))


def test_why_a_pod_waits_is_said_in_the_clusters_words() -> None:
    waiting = {"waiting": {"reason": "ImagePullBackOff"}}
    pod = {"metadata": {"name": "web-1"}, "status": {"phase": "Pending", "containerStatuses": [{"state": waiting}]}}
    assert smoke.waiting_reasons([pod]) == ["web-1: ImagePullBackOff"]
