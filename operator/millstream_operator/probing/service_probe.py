"""Probe the model through its Service, as a user would: the proof behind `Ready=True`.

A ready pod is not enough: the Service may select nothing, a policy may block it, or an older pod may answer. So
`/ready` must carry the hash of the configuration that was rendered, and then the model must generate a token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

import aiohttp

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.kube.client import ApiError, ApiUnreachable, ClusterClient
from millstream_operator.probing.answer import Answer
from millstream_operator.probing.boot_report import read_boot_report
from millstream_operator.rendering.names import HTTP_PORT_NAME
from millstream_operator.rendering.revision import Revision
from millstream_operator.rendering.service import service_url

READY_TIMEOUT_SECONDS = 5.0
COMPLETION_TIMEOUT_SECONDS = 30.0
MAX_ANSWER_BYTES = 1 << 20
PROMPT = "Hello"


class ServiceUnreachable(Exception):
    """No usable HTTP answer came through the Service. `str()` says what happened instead."""


class ServiceAccess(Protocol):
    """HTTP access to a Service; each answer is a JSON object."""

    async def get(self, owner: LLMDeployment, path: str, timeout_seconds: float) -> dict[str, Any]: ...

    async def post(
        self, owner: LLMDeployment, path: str, body: Mapping[str, Any], timeout_seconds: float
    ) -> dict[str, Any]: ...


class DirectAccess:
    """By the Service's DNS name: used inside the cluster."""

    async def get(self, owner: LLMDeployment, path: str, timeout_seconds: float) -> dict[str, Any]:
        return await self._request("GET", owner, path, None, timeout_seconds)

    async def post(
        self, owner: LLMDeployment, path: str, body: Mapping[str, Any], timeout_seconds: float
    ) -> dict[str, Any]:
        return await self._request("POST", owner, path, body, timeout_seconds)

    @staticmethod
    async def _request(
        method: str, owner: LLMDeployment, path: str, body: Mapping[str, Any] | None, timeout_seconds: float
    ) -> dict[str, Any]:
        # A new session per request: a kept connection would stay with the same, older pod.
        timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.request(method, service_url(owner) + path, json=body) as response,
            ):
                body_bytes = await response.content.read(MAX_ANSWER_BYTES)
                if response.status >= 400:
                    raise ServiceUnreachable(f"{path} answered HTTP {response.status}")
                return _json_object(_decode(body_bytes), path)
        except TimeoutError:
            raise ServiceUnreachable(f"{path} gave no answer within {timeout_seconds:.0f} seconds") from None
        except aiohttp.ClientError as error:
            raise ServiceUnreachable(f"{path}: {type(error).__name__}") from None


class ProxyAccess:
    """Through the API server's Service proxy: for an operator that runs outside the cluster, in development."""

    def __init__(self, client: ClusterClient) -> None:
        self._client = client

    async def get(self, owner: LLMDeployment, path: str, timeout_seconds: float) -> dict[str, Any]:
        try:
            return await self._client.get_raw(self._path(owner, path), timeout_seconds)
        except (ApiError, ApiUnreachable) as error:
            raise ServiceUnreachable(f"{path} through the API server: {error}") from None

    async def post(
        self, owner: LLMDeployment, path: str, body: Mapping[str, Any], timeout_seconds: float
    ) -> dict[str, Any]:
        try:
            return await self._client.post_raw(self._path(owner, path), body, timeout_seconds)
        except (ApiError, ApiUnreachable) as error:
            raise ServiceUnreachable(f"{path} through the API server: {error}") from None

    @staticmethod
    def _path(owner: LLMDeployment, path: str) -> str:
        return f"/api/v1/namespaces/{owner.metadata.namespace}/services/{owner.name}:{HTTP_PORT_NAME}/proxy{path}"


async def probe_service(access: ServiceAccess, owner: LLMDeployment, revision: Revision) -> Answer:
    """Check readiness and generate one token. Never raises: a failure is in the answer."""
    try:
        body = await access.get(owner, "/ready", READY_TIMEOUT_SECONDS)
        if (problem := _wrong_answer(body, owner, revision)) is not None:
            return Answer(failure=problem)
        served_name = revision.served_name or owner.served_name
        question = {"model": served_name, "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
        completion = await access.post(owner, "/v1/completions", question, COMPLETION_TIMEOUT_SECONDS)
    except ServiceUnreachable as error:
        return Answer(
            failure=Diagnosis(
                Reason.SERVICE_UNREACHABLE,
                f"The pods are available, but the model does not answer at {service_url(owner)}: {error}.",
            )
        )
    if not completion.get("choices") or completion.get("usage", {}).get("completion_tokens") != 1:
        return Answer(failure=Diagnosis(Reason.WRONG_ANSWER, "The Service answered, but not with a generated token."))
    return Answer(boot=read_boot_report(body))


def _wrong_answer(body: dict[str, Any], owner: LLMDeployment, revision: Revision) -> Diagnosis | None:
    served_name = revision.served_name or owner.served_name
    if body.get("config_hash") == revision.config_hash and body.get("model") == served_name:
        return None
    return Diagnosis(
        Reason.WRONG_ANSWER,
        f"{service_url(owner)} answers with another configuration than the one that was rendered: the Service reaches "
        "another program, or a pod of an older revision.",
    )


def _decode(body: bytes) -> object:
    try:
        return json.loads(body)
    except ValueError:
        return None


def _json_object(value: object, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ServiceUnreachable(f"{path} answered something that is not a JSON object")
    return value
