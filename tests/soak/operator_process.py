"""The operator as a process of its own, started as its image starts it, and started again when it ends, as a pod is."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from tests.soak.control_plane import ControlPlane
from tests.soak.processes import Process, free_port
from tests.soak.proxy import FaultProxy

ROOT = Path(__file__).resolve().parents[2]
READY_SECONDS = 60.0
RUNTIME_IMAGE = "registry.example.com/millstream-runtime:soak"
RESTART_PAUSE_SECONDS = 0.1


@dataclass
class OperatorProcess:
    """`async with` starts it behind its own fault proxy and keeps it running until the end."""

    plane: ControlPlane
    name: str = "operator"
    settings: Mapping[str, str] = field(default_factory=dict)  # its MILLSTREAM_… environment, over the defaults here
    crashes: list[str] = field(default_factory=list)  # unexpected exits
    kills: int = 0

    async def __aenter__(self) -> OperatorProcess:
        self.proxy = FaultProxy(self.plane.url, self.plane.ssl_context(), kill=self.kill)
        await self.proxy.start()
        self._meant_to_run = True
        self._health = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5))
        self.start()
        self._keeper = asyncio.create_task(self._keep_running())
        return self

    async def __aexit__(self, *_: Any) -> None:
        self._meant_to_run = False
        self._keeper.cancel()
        self.process.kill()
        await self.process.stop()
        await self.proxy.stop()
        await self._health.close()

    @property
    def log(self) -> Path:
        return self.plane.folder / f"{self.name}.log"

    def start(self) -> None:
        """A new process, without waiting for it."""
        self.health_port = free_port()
        packages = [str(ROOT / folder) for folder in ("operator", "runtime", "kernels")]
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("MILLSTREAM_", "KUBE"))},
            "PYTHONPATH": os.pathsep.join(packages),
            "KUBECONFIG": str(self.plane.kubeconfig("operator", self.proxy.url)),
            "MILLSTREAM_RUNTIME_IMAGE": RUNTIME_IMAGE,
            "MILLSTREAM_SERVICE_ACCESS": "Proxy",
            "MILLSTREAM_LEADER_ELECTION": "Disabled",
            "MILLSTREAM_HEALTH_PORT": str(self.health_port),
            **self.settings,
        }
        self.process = Process.start(self.name, [sys.executable, "-m", "millstream_operator"], self.log, environment)

    def kill(self) -> None:
        """SIGKILL."""
        self.kills += 1
        self.process.kill()

    async def stop(self) -> None:
        """SIGTERM, and stay away until `start_again`."""
        self._meant_to_run = False
        await self.process.stop()

    def start_again(self) -> None:
        self.start()
        self._meant_to_run = True

    async def wait_ready(self) -> None:
        """Until its first listing is done."""
        await self.process.wait_until(self._answers_ready, READY_SECONDS)

    async def wait_leading(self) -> None:
        """Until it may write."""
        await self.wait_ready()
        await self.process.wait_until(self._leads, READY_SECONDS)

    async def healthy(self) -> bool:
        """What the kubelet would ask."""
        return await self._answers("/healthz")

    async def metrics(self) -> dict[str, float]:
        """Its own metrics by name; labels are kept as `name{label=value}`."""
        async with self._health.get(f"http://127.0.0.1:{self.health_port}/metrics") as answer:
            text = await answer.text()
        found = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return found

    async def _answers_ready(self) -> bool:
        return await self._answers("/readyz")

    async def _leads(self) -> bool:
        return (await self.metrics()).get("millstream_operator_leader") == 1

    async def _answers(self, path: str) -> bool:
        with suppress(aiohttp.ClientError, TimeoutError):
            async with self._health.get(f"http://127.0.0.1:{self.health_port}{path}") as answer:
                return answer.status == 200
        return False

    async def _keep_running(self) -> None:
        """As the kubelet does. An end that was no SIGKILL of ours is remembered as a crash."""
        while True:
            await asyncio.sleep(RESTART_PAUSE_SECONDS)
            code = self.process.exit_code
            if code is None or not self._meant_to_run:
                continue
            if code != -9:
                self.crashes.append(f"exit code {code}: {self._last_words()}")
            self.start()

    def _last_words(self) -> str:
        return " | ".join(self.log.read_text(errors="replace").strip().splitlines()[-3:])
