"""Probe the model through its Service, as a user would: the proof behind `Ready=True`.

A ready pod is not enough: the Service may select nothing, a policy may block it, or an older pod may answer. So
`/ready` must carry the hash of the configuration that was rendered, and then the model must generate a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.kube.bounded_http import UnusableAnswer, request_json
from millstream_operator.kube.client import ApiError, ApiUnreachable, ClusterClient
from millstream_operator.probing.answer import Answer
from millstream_operator.probing.boot_report import read_boot_report
from millstream_operator.probing.probe_key import NO_KEY, ProbeKey
from millstream_operator.rendering.names import HTTP_PORT_NAME
from millstream_operator.rendering.revision import Revision
from millstream_operator.rendering.service import service_url

READY_TIMEOUT_SECONDS = 5.0
COMPLETION_TIMEOUT_SECONDS = 30.0
LIMIT_BYTES = 1 << 20
LONGEST_PROBLEM = 300  # characters
PROMPT = "Hello"
UNAUTHENTICATED, TOO_MANY_REQUESTS = 401, 429
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class ServiceUnreachable(Exception):
    """No usable HTTP answer came through the Service. `str()` says what happened instead."""


class ServiceBusy(ServiceUnreachable):
    """The model has as many requests as it takes (HTTP 429)."""


class ServiceAccess(Protocol):
    """HTTP access to a Service; each answer is a JSON object. `headers` may hold an API key and are never logged."""

    async def get(self, owner: LLMDeployment, path: str, timeout_seconds: float) -> dict[str, Any]: ...

    async def post(
        self,
        owner: LLMDeployment,
        path: str,
        body: Mapping[str, Any],
        timeout_seconds: float,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> dict[str, Any]: ...


class DirectAccess:
    """By the Service's DNS name: used inside the cluster."""

    async def get(self, owner: LLMDeployment, path: str, timeout_seconds: float) -> dict[str, Any]:
        return await self._request("GET", owner, path, None, timeout_seconds, NO_HEADERS)

    async def post(
        self,
        owner: LLMDeployment,
        path: str,
        body: Mapping[str, Any],
        timeout_seconds: float,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> dict[str, Any]:
        return await self._request("POST", owner, path, body, timeout_seconds, headers)

    @staticmethod
    async def _request(
        method: str,
        owner: LLMDeployment,
        path: str,
        body: Mapping[str, Any] | None,
        timeout_seconds: float,
        headers: Mapping[str, str],
    ) -> dict[str, Any]:
        url = service_url(owner) + path
        try:
            return await request_json(
                method, url, timeout_seconds=timeout_seconds, limit_bytes=LIMIT_BYTES, body=body, headers=headers
            )
        except UnusableAnswer as problem:
            raise _error(problem.status)(f"{path} {problem}") from None


class ProxyAccess:
    """Through the API server's Service proxy: for an operator that runs outside the cluster, in development.

    The API server keeps the Authorization header to itself, so `headers` are not sent.
    """

    def __init__(self, client: ClusterClient) -> None:
        self._client = client

    async def get(self, owner: LLMDeployment, path: str, timeout_seconds: float) -> dict[str, Any]:
        try:
            return await self._client.get_raw(self._path(owner, path), timeout_seconds)
        except (ApiError, ApiUnreachable) as error:
            raise ServiceUnreachable(f"{path} through the API server: {error}") from None

    async def post(
        self,
        owner: LLMDeployment,
        path: str,
        body: Mapping[str, Any],
        timeout_seconds: float,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> dict[str, Any]:
        try:
            return await self._client.post_raw(self._path(owner, path), body, timeout_seconds)
        except ApiError as error:
            if error.status == UNAUTHENTICATED and headers:
                raise ServiceUnreachable(
                    f"{path} asks for an API key, which the API server's proxy does not pass on; run the operator "
                    "inside the cluster"
                ) from None
            raise _error(error.status)(f"{path} through the API server: {error}") from None
        except ApiUnreachable as error:
            raise ServiceUnreachable(f"{path} through the API server: {error}") from None

    @staticmethod
    def _path(owner: LLMDeployment, path: str) -> str:
        return f"/api/v1/namespaces/{owner.metadata.namespace}/services/{owner.name}:{HTTP_PORT_NAME}/proxy{path}"


async def probe_service(
    access: ServiceAccess, owner: LLMDeployment, revision: Revision, key: ProbeKey = NO_KEY
) -> Answer:
    """Check readiness and generate one token. Never raises: a failure is in the answer. `/ready` needs no key."""
    try:
        body = await access.get(owner, "/ready", READY_TIMEOUT_SECONDS)
        if (problem := _wrong_answer(body, owner, revision)) is not None:
            return Answer(failure=problem)
        served_name = revision.served_name or owner.served_name
        question = {"model": served_name, "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
        completion = await access.post(owner, "/v1/completions", question, COMPLETION_TIMEOUT_SECONDS, key.headers())
    except ServiceUnreachable as error:
        return Answer(
            is_busy=isinstance(error, ServiceBusy),
            failure=Diagnosis(
                Reason.SERVICE_UNREACHABLE,
                f"The pods are available, but the model does not answer at {service_url(owner)}: {error}.",
            ),
        )
    usage = completion.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, Mapping) else None
    if not completion.get("choices") or tokens != 1:
        return Answer(
            failure=Diagnosis(
                Reason.WRONG_ANSWER,
                f"{service_url(owner)}/v1/completions answered without a generated token: it is not the runtime "
                "that answers there. Check what the Service selects.",
            )
        )
    return Answer(boot=read_boot_report(body), keys_problem=_keys_problem(body))


async def ask_about_keys(access: ServiceAccess, owner: LLMDeployment) -> str | None:
    """Return what a pod says of its API keys: "": all can be used; None: it does not answer. `/ready` needs no key."""
    try:
        return _keys_problem(await access.get(owner, "/ready", READY_TIMEOUT_SECONDS))
    except ServiceUnreachable:
        return None


def _keys_problem(body: Mapping[str, Any]) -> str:
    """What the runtime says of its API keys, in one line of bounded length: any program may answer."""
    said = body.get("api_keys_problem")
    return " ".join(said.split())[:LONGEST_PROBLEM] if isinstance(said, str) and said.isprintable() else ""


def _error(status: int | None) -> type[ServiceUnreachable]:
    return ServiceBusy if status == TOO_MANY_REQUESTS else ServiceUnreachable


def _wrong_answer(body: dict[str, Any], owner: LLMDeployment, revision: Revision) -> Diagnosis | None:
    served_name = revision.served_name or owner.served_name
    if body.get("config_hash") == revision.config_hash and body.get("model") == served_name:
        return None
    return Diagnosis(
        Reason.WRONG_ANSWER,
        f"{service_url(owner)} answers with another configuration than the one that was rendered: the Service reaches "
        "another program, or a pod of an older revision.",
    )
