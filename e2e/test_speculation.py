"""A model with a draft from another source, or with an EAGLE head, gives the answers of the model alone."""

from __future__ import annotations

import urllib.request

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from e2e.cluster import Cluster, Object, eventually
from e2e.deployments import MODEL, boot_config, condition, llmd, pods, read, wait_ready
from e2e.durations import Durations
from e2e.hub_pod import COMMIT, REPOSITORY, hub
from e2e.model_artifact import push_model
from e2e.release import Release
from e2e.test_sources import INSIDE, TOKEN, token_secret, with_env

NAME = "pair"
DRAFT_REPOSITORY = "millstream-e2e/draft"
QUESTION = "What is a KV cache?"
# On a busy machine drafts may cost more than they give, and a governor that enforces then proposes none.
ALWAYS_DRAFTS: Object = {"governor": {"mode": "Disabled"}}


def pair(endpoint: str, reference: str) -> Object:
    """The demo model from the hub, its draft from the registry."""
    hub_source = {"huggingFace": {"repository": REPOSITORY, "tokenSecretRef": {"name": "hub-token", "key": "token"}}}
    speculation = ALWAYS_DRAFTS | {"draftModel": {"source": {"image": {"reference": reference}}}}
    deployment = llmd(NAME, model={"servedName": MODEL, "source": hub_source}, speculation=speculation)
    return with_env(deployment, HF_ENDPOINT=endpoint, PLAIN_HTTP_REGISTRIES=INSIDE)


def answer(cluster: Cluster, namespace: str) -> tuple[str, float]:
    """A greedy answer, and the drafts that the pod has had accepted by then."""
    with cluster.port_forward(namespace, f"service/{NAME}", 80) as port:
        url = f"http://127.0.0.1:{port}"
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            said = client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=64
            )
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as page:  # noqa: S310 - a forwarded port
            families = [*text_string_to_metric_families(page.read().decode())]
    accepted = (
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == "vllm:spec_decode_num_accepted_tokens_total"
    )
    return said.choices[0].message.content or "", sum(accepted)


@pytest.mark.timeout(900)
def test_a_pair_from_a_hub_and_a_registry_is_pinned_and_answers_as_the_model_alone(
    cluster: Cluster, release: Release, warm_image: None, namespace: str, durations: Durations
) -> None:
    digest = push_model("demo-draft", DRAFT_REPOSITORY, "1")
    reference = f"{INSIDE}/{DRAFT_REPOSITORY}"
    with hub(cluster, namespace, release.runtime_image, TOKEN) as endpoint:
        cluster.apply(namespace, token_secret(TOKEN))
        cluster.apply(namespace, pair(endpoint, f"{reference}:none"))
        refused = eventually(
            lambda: condition(read(cluster, namespace, NAME), "Planned"),
            lambda planned: planned.get("reason") == "DownloadFailed",
            what="DownloadFailed",
        )
        named = f"The draft model {reference}:none (speculation.draftModel.source) cannot be inspected"
        assert refused["message"].startswith(named)
        with durations.measure("pair of a hub and a registry -> Ready"):
            cluster.apply(namespace, pair(endpoint, f"{reference}:1"))
            ready = wait_ready(cluster, namespace, NAME)
        assert ready["status"]["model"] == {
            "servedName": MODEL,
            "resolvedRevision": COMMIT,
            "resolvedDraftRevision": digest,
        }
        assert ready["status"]["plan"]["speculation"]["method"] == "DraftModel"
        assert ready["status"]["plan"]["memory"]["draftWeightsBytes"] > 0
        (pod,) = pods(cluster, namespace, NAME)
        assert boot_config(cluster, namespace, pod["spec"])["draft_model"] == "/models/draft/image"
        assert TOKEN not in str(pod["spec"])
        drafted, accepted = answer(cluster, namespace)
        assert accepted > 0

        cluster.apply(namespace, pair(endpoint, f"{reference}:1") | {"spec": alone(endpoint)})
        wait_ready(cluster, namespace, NAME)
        plain, without = answer(cluster, namespace)
    assert drafted == plain
    assert without == 0


def test_an_eagle_head_drafts_and_the_answer_is_that_of_the_model_alone(
    cluster: Cluster, release: Release, warm_image: None, namespace: str, durations: Durations
) -> None:
    head = ALWAYS_DRAFTS | {"method": "EAGLE", "draftModel": {"source": {"local": {"path": "demo-eagle"}}}}
    with durations.measure("model with an EAGLE head -> Ready"):
        cluster.apply(namespace, llmd(NAME, speculation=head))
        ready = wait_ready(cluster, namespace, NAME)
    assert ready["status"]["plan"]["speculation"]["method"] == "EAGLE"
    assert ready["status"]["plan"]["memory"]["draftWeightsBytes"] > 0
    drafted, accepted = answer(cluster, namespace)
    assert accepted > 0

    cluster.apply(namespace, llmd(NAME, speculation=head | {"draftModel": {"source": {"local": {"path": MODEL}}}}))
    eventually(
        lambda: condition(read(cluster, namespace, NAME), "Planned"),
        lambda planned: "speculation.method is EAGLE, but the weights are those of no EAGLE head" in planned["message"],
        what="a model refused as a head",
    )

    cluster.apply(namespace, llmd(NAME))
    wait_ready(cluster, namespace, NAME)
    plain, without = answer(cluster, namespace)
    assert drafted == plain
    assert without == 0


def alone(endpoint: str) -> Object:
    """The same spec without a draft."""
    spec: Object = pair(endpoint, "none")["spec"]
    return {name: value for name, value in spec.items() if name != "speculation"}
