"""Names that helm takes, and that YAML or the API server would read otherwise or refuse."""

from __future__ import annotations

import re

import pytest

from tests.support.helm_chart import of_kind, operator_of, pod_specs, render

LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
SUBDOMAIN = rf"{LABEL}(\.{LABEL})*"
SERVICE_NAME = "[a-z]([-a-z0-9]*[a-z0-9])?"
RELEASES = ["123", "1st", "v1.2", "x" * 53, "0" * 53, f"1.{'x' * 51}", f"{'x' * 51}.y"]


@pytest.mark.parametrize("release", RELEASES)
def test_every_name_of_a_release_is_one_that_the_api_server_takes(release: str) -> None:
    """helm takes names with dots, with a digit first and of 53 characters."""
    documents = render("serviceMonitor.enabled=true", "crds.enabled=false", release=release)
    assert of_kind(documents, "Service")
    for document in documents:
        name, is_service = document["metadata"]["name"], document["kind"] == "Service"
        assert re.fullmatch(SERVICE_NAME if is_service else SUBDOMAIN, name), f"{document['kind']} {name}"
        assert len(name) <= (63 if is_service else 253)


@pytest.mark.parametrize("word", ["123", "1e3", "0x1f", "true", "on", "null"])
def test_a_name_that_yaml_would_read_as_a_number_or_a_truth_stays_a_word(word: str) -> None:
    """The API server, and helm itself, refuse a namespace that is a number."""
    lists = [f'operator.{field}=["{word}"]' for field in ("watchNamespaces", "imagePullSecrets")]
    names = [f'operator.priorityClassName="{word}"', f'catalog.configMap="{word}"']
    documents = render(*lists, *names, "crds.enabled=false", namespace=word)
    namespaces = {one["metadata"]["namespace"] for one in documents if "namespace" in one["metadata"]}
    assert namespaces == {word, "default"}
    subjects = [one for document in documents for one in document.get("subjects", ())]
    assert {one["namespace"] for one in subjects} == {word}
    (test,) = of_kind(documents, "Pod")
    environment = {one["name"]: one["value"] for one in test["spec"]["containers"][0]["env"]}
    assert environment["OPERATOR_NAMESPACE"] == word
    for spec in pod_specs(documents):
        assert spec["imagePullSecrets"] == [{"name": word}]
    pod = operator_of(documents)["spec"]["template"]["spec"]
    assert pod["priorityClassName"] == word
    (volume,) = (one for one in pod["volumes"] if one["name"] == "gpu-catalog")
    assert volume["configMap"]["name"] == word
