"""A control plane without a node, as local processes on the loopback interface: up in seconds, gone without a trace.

Real are etcd, kube-apiserver (with its audit log), kube-controller-manager (which makes ReplicaSets and pods, and
collects garbage) and kube-scheduler. Simulated is what stands behind them: kwok plays the kubelets, so a pod is Ready
a moment after it is bound. Everybody is trusted (`AlwaysAllow`): rights are the end-to-end tests' business. etcd does
not wait for the disk; that is the same for everybody who is compared here.
"""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from tests.soak.api import Api
from tests.soak.processes import Process, free_port
from tests.soak.simulated_pods import stages
from tests.soak.tools import Tools

START_SECONDS = 120.0
COLLECTOR = "garbage-collector-controller"
OPERATOR_USER = "system:serviceaccount:millstream-system:millstream"
_TOKENS = {
    "admin": ("admin", "system:masters"),
    "controllers": ("system:kube-controller-manager", "system:masters"),
    "scheduler": ("system:kube-scheduler", "system:masters"),
    "kwok": ("kwok", "system:masters"),
    # As in a pod, so that the API server's priority levels treat it as they would there.
    "operator": (OPERATOR_USER, "system:serviceaccounts,system:authenticated"),
}
# Of controllers and scheduler. No port of their own, so that several control planes can be up at once.
_FAST = (
    "--secure-port=0",
    "--leader-elect=false",
    "--kube-api-qps=2000",
    "--kube-api-burst=4000",
    "--profiling=false",
)
# Every write of the operator, when it came and when it was answered; nothing else, so that the log costs nothing.
_AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {
            "level": "Metadata",
            "users": [OPERATOR_USER],
            "verbs": ["create", "update", "patch", "delete", "deletecollection"],
        },
        {"level": "None"},
    ],
}


@dataclass
class ControlPlane:
    """`async with ControlPlane(tools) as plane:` starts it; `plane.admin` speaks to it as an administrator."""

    tools: Tools
    keep: bool = False  # leave the folder with all logs
    collects_garbage: bool = True  # otherwise from `start_collector` on
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="millstream-soak-")))
    processes: list[Process] = field(default_factory=list)
    port: int = field(default_factory=free_port)

    async def __aenter__(self) -> ControlPlane:
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.admin.close()
        await self._stop()

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def audit_log(self) -> Path:
        return self.folder / "audit.log"

    def ssl_context(self) -> ssl.SSLContext:
        """Trusts this API server alone."""
        return ssl.create_default_context(cafile=str(self.folder / "certificates" / "apiserver.crt"))

    def kubeconfig(self, user: str, server: str | None = None) -> Path:
        """A kubeconfig of one of the users; `server` is another address, such as a proxy's."""
        cluster = {"server": server or self.url}
        if server is None:
            cluster["certificate-authority"] = str(self.folder / "certificates" / "apiserver.crt")
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "soak", "cluster": cluster}],
            "users": [{"name": user, "user": {"token": user}}],
            "contexts": [{"name": "soak", "context": {"cluster": "soak", "user": user}}],
            "current-context": "soak",
        }
        path = self.folder / f"kubeconfig-{user}{'-' + server.rpartition(':')[2] if server else ''}"
        path.write_text(json.dumps(content))
        return path

    def cpu_seconds(self) -> float:
        """Processor time of the whole control plane so far: work that a busy machine cannot stretch."""
        return sum(process.cpu_seconds() for process in self.processes)

    def check(self) -> None:
        """Raises DidNotStart when one of the processes has ended."""
        for process in self.processes:
            process.check()

    async def _start(self) -> None:
        self._write_files()
        etcd = self._start_etcd()
        api_server = self._start_api_server(etcd)
        await api_server.wait_until(self._certificate_is_there, START_SECONDS)
        self.admin = Api(self.url, "admin", self.ssl_context())
        await api_server.wait_until(self.admin.is_ready, START_SECONDS)
        self._start_controllers()
        self._start_kwok()

    async def _stop(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            await process.stop()
        if not self.keep:
            shutil.rmtree(self.folder, ignore_errors=True)

    async def _certificate_is_there(self) -> bool:
        return (self.folder / "certificates" / "apiserver.crt").is_file()

    def _run(self, name: str, *command: str | Path) -> Process:
        process = Process.start(name, command, self.folder / f"{name}.log")
        self.processes.append(process)
        return process

    def _write_files(self) -> None:
        key = ["genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048", "-out", str(self._token_key)]
        subprocess.run([self.tools.openssl, *key], check=True, capture_output=True)
        (self.folder / "tokens.csv").write_text(
            "".join(f'{token},{user},{token},"{groups}"\n' for token, (user, groups) in _TOKENS.items())
        )
        (self.folder / "audit.yaml").write_text(json.dumps(_AUDIT_POLICY))

    @property
    def _token_key(self) -> Path:
        return self.folder / "tokens.key"

    def _start_etcd(self) -> str:
        client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        self._run(
            "etcd",
            self.tools.etcd,
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        )
        return client

    def _start_api_server(self, etcd: str) -> Process:
        return self._run(
            "kube-apiserver",
            self.tools.api_server,
            f"--etcd-servers={etcd}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            "--endpoint-reconciler-type=none",
            f"--secure-port={self.port}",
            f"--cert-dir={self.folder / 'certificates'}",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--authorization-mode=AlwaysAllow",
            "--allow-privileged=true",  # as kubeadm has it: otherwise validation refuses such pods before admission
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={self._token_key}",
            f"--service-account-signing-key-file={self._token_key}",
            "--service-cluster-ip-range=10.96.0.0/12",  # the default holds 254 Services
            f"--audit-policy-file={self.folder / 'audit.yaml'}",
            f"--audit-log-path={self.audit_log}",
            "--audit-log-mode=blocking",
            "--disable-admission-plugins=TaintNodesByCondition",  # kwok's nodes never answer for their conditions
            "--watch-cache=true",
            "--profiling=false",
        )

    def start_collector(self) -> None:
        """Start the garbage collector as a process of its own, where the controllers run without it."""
        self._start_controller_manager("garbage-collector", COLLECTOR)

    def _start_controllers(self) -> None:
        left_out = ["node-lifecycle-controller", "node-ipam-controller"]
        left_out += [] if self.collects_garbage else [COLLECTOR]
        self._start_controller_manager("kube-controller-manager", ",".join(["*", *(f"-{one}" for one in left_out)]))
        self._run("kube-scheduler", self.tools.scheduler, f"--kubeconfig={self.kubeconfig('scheduler')}", *_FAST)

    def _start_controller_manager(self, name: str, controllers: str) -> None:
        self._run(
            name,
            self.tools.controller_manager,
            f"--kubeconfig={self.kubeconfig('controllers')}",
            f"--service-account-private-key-file={self._token_key}",
            f"--controllers={controllers}",
            "--horizontal-pod-autoscaler-sync-period=1s",  # what it says of a new autoscaler, not after 15 seconds
            *_FAST,
        )

    def _start_kwok(self) -> None:
        self._run(
            "kwok",
            self.tools.kwok,
            f"--kubeconfig={self.kubeconfig('kwok')}",
            "--manage-all-nodes=true",
            f"--server-address=127.0.0.1:{free_port()}",
            "--node-lease-duration-seconds=2000",  # 500 nodes that say they live are a load by themselves
            f"--config={self._stages()}",
        )

    def _stages(self) -> Path:
        path = self.folder / "kwok.yaml"
        path.write_text(stages())
        return path
