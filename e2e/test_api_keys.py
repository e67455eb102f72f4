"""A model with API keys answers a request with one of them, and no other."""

from __future__ import annotations

import base64

import httpx
import pytest

from e2e.cluster import Cluster, Object
from e2e.deployments import MODEL, llmd, wait_ready
from e2e.release import Release

KEY, ANOTHER_KEY = "e2e-key-of-team-search", "e2e-key-of-team-shop"
QUESTION = {"model": MODEL, "messages": [{"role": "user", "content": "What is a pod?"}], "max_tokens": 8}


def keys_secret(*keys: str) -> Object:
    data = {"keys": base64.b64encode("\n".join(keys).encode()).decode()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "chat-keys"}, "data": data}


@pytest.mark.quick
def test_a_request_needs_one_of_the_keys(cluster: Cluster, release: Release, warm_image: None, namespace: str) -> None:
    auth = {"apiKeysSecretRef": {"name": "chat-keys", "key": "keys"}}
    cluster.apply(namespace, keys_secret(KEY, ANOTHER_KEY), llmd("locked", auth=auth))
    wait_ready(cluster, namespace, "locked")  # the operator's probe has a key of its own
    with cluster.port_forward(namespace, "service/locked", 80) as port:

        def ask(**headers: str) -> httpx.Response:
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            return httpx.post(url, json=QUESTION, headers=headers, timeout=60)

        for key in (KEY, ANOTHER_KEY):
            right = ask(Authorization=f"Bearer {key}")
            assert right.status_code == 200, right.text
            assert right.json()["choices"][0]["message"]["content"]
        refused = {
            "wrong": ask(Authorization=f"Bearer {KEY}-wrong"),
            "empty": ask(Authorization="Bearer"),
            "not a bearer": ask(Authorization=KEY),
            "none": ask(),
        }
        for what, answer in refused.items():
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), what
            assert "choices" not in answer.json(), what
        assert httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=10).status_code == 401
        assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=10).status_code == 200, "probes have no key"
