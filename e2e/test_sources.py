"""A model that is not in the image: inspected by a Job, downloaded before the runtime starts, or refused by name."""

from __future__ import annotations

import base64
import json
from typing import Any

from e2e.cluster import Cluster, Object, eventually
from e2e.deployments import MODEL, children, condition, llmd, pods, read, wait_ready
from e2e.durations import Durations
from e2e.hub_pod import COMMIT, REPOSITORY, hub
from e2e.model_artifact import MODELS, push_model
from e2e.node_volume import STORAGE_CLASS, node_volume
from e2e.release import Release
from hack.cluster.registry import CONTAINER, INNER_PORT

TOKEN = "hf_of-the-tests"
MODEL_REPOSITORY = "millstream-e2e/model"
INSIDE = f"{CONTAINER}:{INNER_PORT}"  # the registry's name on the node's network; it has no TLS


def token_secret(token: str) -> Object:
    data = {"token": base64.b64encode(token.encode()).decode()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hub-token"}, "data": data}


def with_env(deployment: Object, **env: str) -> Object:
    (container,) = deployment["spec"]["podTemplate"]["spec"]["containers"]
    container["env"] = [{"name": name, "value": value} for name, value in env.items()]
    return deployment


def from_hub(endpoint: str, cache: dict[str, Any] | None = None, **spec: Any) -> Object:
    source = {"huggingFace": {"repository": REPOSITORY, "tokenSecretRef": {"name": "hub-token", "key": "token"}}}
    model = {"servedName": "downloaded", "source": source} | ({"cache": cache} if cache else {})
    return with_env(llmd("downloaded", model=model, **spec), HF_ENDPOINT=endpoint)


def fetched(pod: Object) -> dict[str, Any]:
    """What the download of a pod said at its end."""
    (status,) = pod["status"]["initContainerStatuses"]
    said: dict[str, Any] = json.loads(status["state"]["terminated"]["message"])
    return said


def wait_for_reason(cluster: Cluster, namespace: str, name: str, reason: str) -> Object:
    return eventually(
        lambda: condition(read(cluster, namespace, name), "Planned"),
        lambda planned: planned.get("reason") == reason,
        what=reason,
        timeout_seconds=180,
    )


def test_a_model_from_a_hub_is_inspected_pinned_and_downloaded_with_the_token(
    cluster: Cluster, release: Release, warm_image: None, namespace: str, durations: Durations
) -> None:
    with hub(cluster, namespace, release.runtime_image, TOKEN) as endpoint:
        cluster.apply(namespace, token_secret(TOKEN))
        with durations.measure("model from a hub -> Ready"):
            cluster.apply(namespace, from_hub(endpoint))
            ready = wait_ready(cluster, namespace, "downloaded")
    assert ready["status"]["model"]["resolvedRevision"] == COMMIT
    (pod,) = pods(cluster, namespace, "downloaded")
    assert (fetched(pod)["event"], fetched(pod)["requested_revision"]) == ("fetched", COMMIT)
    assert TOKEN not in str(pod["spec"])
    eventually(lambda: cluster.items("jobs", "-n", namespace), lambda jobs: not jobs, what="no Job left")
    (record,) = cluster.items("configmaps", "-n", namespace, "-l", "millstream.dev/inspection")
    assert record["immutable"] is True


def test_a_refused_token_is_one_clear_reason_and_a_good_one_mends_it(
    cluster: Cluster, release: Release, warm_image: None, namespace: str, durations: Durations
) -> None:
    with hub(cluster, namespace, release.runtime_image, TOKEN) as endpoint:
        cluster.apply(namespace, token_secret("hf_another"))
        with durations.measure("wrong token -> DownloadUnauthorized"):
            cluster.apply(namespace, from_hub(endpoint))
            found = wait_for_reason(cluster, namespace, "downloaded", "DownloadUnauthorized")
        assert found["status"] == "False"
        assert "HTTP 401" in found["message"]
        assert REPOSITORY in found["message"]
        assert ("Deployment", "downloaded") not in children(cluster, namespace, "downloaded")
        cluster.apply(namespace, token_secret(TOKEN))
        wait_ready(cluster, namespace, "downloaded")


def test_a_model_image_from_the_local_registry_is_pinned_by_digest_and_served(
    cluster: Cluster, release: Release, warm_image: None, namespace: str, durations: Durations
) -> None:
    digest = push_model(MODEL, MODEL_REPOSITORY, "1")
    model = {"servedName": "pulled", "source": {"image": {"reference": f"{INSIDE}/{MODEL_REPOSITORY}:1"}}}
    with durations.measure("model from a registry -> Ready"):
        cluster.apply(namespace, with_env(llmd("pulled", model=model), PLAIN_HTTP_REGISTRIES=INSIDE))
        ready = wait_ready(cluster, namespace, "pulled")
    assert ready["status"]["model"]["resolvedRevision"] == digest
    (pod,) = pods(cluster, namespace, "pulled")
    assert fetched(pod)["revision"] == digest


def test_replicas_share_one_download_in_a_cache_that_goes_with_the_deployment(
    cluster: Cluster, release: Release, warm_image: None, namespace: str
) -> None:
    cache = {"size": "1Gi", "storageClassName": STORAGE_CLASS}
    with (
        hub(cluster, namespace, release.runtime_image, TOKEN) as endpoint,
        node_volume(cluster, namespace, "downloaded-model-cache", release.operator_image),
    ):
        cluster.apply(namespace, token_secret(TOKEN))
        cluster.apply(namespace, from_hub(endpoint, cache, replicas=2))
        wait_ready(cluster, namespace, "downloaded")
        said = [fetched(pod) for pod in pods(cluster, namespace, "downloaded")]
        assert sorted(one["kept"] for one in said) == [False, True], "one downloads, the other finds it there"
        refused = cluster.refused(
            *("patch", "llmd", "downloaded", "-n", namespace, "--type=merge"),
            *("-p", json.dumps({"spec": {"model": {"cache": {"size": "512Mi"}}}})),
        )
        assert "never shrink" in refused
        cluster.kubectl("delete", "llmd", "downloaded", "-n", namespace)
        eventually(
            lambda: cluster.items("persistentvolumeclaims", "-n", namespace),
            lambda claims: not claims,
            what="the cache gone",
        )


def claim(name: str) -> Object:
    spec = {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": STORAGE_CLASS,
        "resources": {"requests": {"storage": "1Gi"}},
    }
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}


def test_a_claim_is_waited_for_by_name_and_a_folder_without_a_model_is_told(
    cluster: Cluster, release: Release, warm_image: None, namespace: str
) -> None:
    model = {"source": {"persistentVolumeClaim": {"claimName": "models"}}}
    cluster.apply(namespace, llmd("mounted", model=model))
    waiting = wait_for_reason(cluster, namespace, "mounted", "VolumePending")
    assert "models" in waiting["message"]
    with node_volume(cluster, namespace, "models", release.operator_image):
        cluster.apply(namespace, claim("models"))
        found = wait_for_reason(cluster, namespace, "mounted", "CheckpointInvalid")
    assert "config.json" in found["message"]


def test_replicas_on_a_claim_for_one_node_are_refused(
    cluster: Cluster, release: Release, warm_image: None, namespace: str
) -> None:
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "shape"}}
    config |= {"data": {"config.json": (MODELS / MODEL / "config.json").read_text()}}
    source = {"persistentVolumeClaim": {"claimName": "models"}}
    model = {"source": source, "configMapRef": {"name": "shape", "key": "config.json"}}
    cluster.apply(namespace, config, claim("models"), llmd("spread", model=model, replicas=2))
    found = eventually(
        lambda: condition(read(cluster, namespace, "spread"), "Ready"),
        lambda ready: ready.get("reason") == "Infeasible",
        what="Infeasible",
    )
    assert "ReadWriteOnce" in found["message"]
    assert ("Deployment", "spread") not in children(cluster, namespace, "spread")
