"""A model that is not in the image: downloaded from a hub before the runtime starts, or refused with one reason."""

from __future__ import annotations

import base64
from typing import Any

from e2e.cluster import Cluster, Object, eventually
from e2e.deployments import condition, llmd, pods, read, wait_ready
from e2e.durations import Durations
from e2e.hub_pod import REPOSITORY, hub
from e2e.release import Release

TOKEN = "hf_of-the-tests"


def token_secret(token: str) -> Object:
    data = {"token": base64.b64encode(token.encode()).decode()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hub-token"}, "data": data}


def from_hub(endpoint: str, **spec: Any) -> Object:
    source = {"huggingFace": {"repository": REPOSITORY, "tokenSecretRef": {"name": "hub-token", "key": "token"}}}
    deployment = llmd("downloaded", model={"servedName": "downloaded", "source": source}, **spec)
    (container,) = deployment["spec"]["podTemplate"]["spec"]["containers"]
    container["env"] = [{"name": "HF_ENDPOINT", "value": endpoint}]
    return deployment


def test_a_model_from_a_hub_is_downloaded_with_the_token_and_served(
    cluster: Cluster, release: Release, warm_image: None, namespace: str, durations: Durations
) -> None:
    with hub(cluster, namespace, release.runtime_image, TOKEN) as endpoint:
        cluster.apply(namespace, token_secret(TOKEN))
        with durations.measure("model from a hub -> Ready"):
            cluster.apply(namespace, from_hub(endpoint))
            wait_ready(cluster, namespace, "downloaded")
    (pod,) = pods(cluster, namespace, "downloaded")
    (fetched,) = pod["status"]["initContainerStatuses"]
    assert '"event": "fetched"' in fetched["state"]["terminated"]["message"]
    assert TOKEN not in str(pod["spec"])


def test_a_refused_token_is_one_clear_reason(
    cluster: Cluster, release: Release, warm_image: None, namespace: str
) -> None:
    with hub(cluster, namespace, release.runtime_image, TOKEN) as endpoint:
        cluster.apply(namespace, token_secret("hf_another"))
        cluster.apply(namespace, from_hub(endpoint))
        found = eventually(
            lambda: condition(read(cluster, namespace, "downloaded"), "Ready"),
            lambda ready: ready.get("reason") == "DownloadUnauthorized",
            what="DownloadUnauthorized",
            timeout_seconds=60,
        )
    assert "HTTP 401" in found["message"]
    assert REPOSITORY in found["message"]
