"""The chart, rendered by helm: its CRD, its upgrades, its page, and no value that is silently ignored."""

from __future__ import annotations

import json

import pytest
import yaml

from hack.reference import chart as chart_reference
from tests.support.helm_chart import (
    CHART,
    IMAGES,
    PREVIOUS,
    ROOT,
    Document,
    helm,
    of_kind,
    operator_of,
    render,
)


def test_lint_is_clean_even_when_strict() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout
    assert "WARNING" not in done.stdout
    assert "ERROR" not in done.stdout


def test_the_crd_is_the_generated_one_word_for_word() -> None:
    generated = yaml.safe_load((ROOT / "crds" / "millstream.dev_llmdeployments.yaml").read_text())
    (plain,) = of_kind(render("crds.keep=false"), "CustomResourceDefinition")
    assert plain == generated
    (kept,) = of_kind(render(), "CustomResourceDefinition")
    assert kept["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert kept == generated
    assert not of_kind(render("crds.enabled=false"), "CustomResourceDefinition")


def test_two_releases_share_no_name() -> None:
    def names(release: str) -> set[str]:
        documents = render("crds.enabled=false", release=release)
        return {document["metadata"]["name"] for document in documents}

    assert not names("one") & names("two")


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("operator.imagee=x", "imagee"),
        ("surprise=1", "surprise"),
        ("operator.logLevel=Loud", "logLevel"),
        ("crds.keep=maybe", "crds/keep"),
        ("operator.replicas=-1", "replicas"),
        ("operator.replicas=two", "replicas"),
        ("serviceMonitor.interval=often", "interval"),
        ("monitoring.prometheusURL=prometheus", "prometheusURL"),
        ("monitoring.prometheusURL=http://me:secret@prometheus", "prometheusURL"),
        ('podDefaults.tolerations=[{"keyy":"gpu"}]', "keyy"),
        ("operator.resources.limits.memory=much", "memory"),
        ('operator.watchNamespaces=["UPPER"]', "watchNamespaces"),
        ("inventory.mode=Maybe", "mode"),
        ('inventory.nodePools=[{"product":"L4","gpusPerNode":0,"maxNodes":1}]', "gpusPerNode"),
        ('inventory.nodePools=[{"product":"L4","gpus":8,"gpusPerNode":8,"maxNodes":1}]', "gpus"),
        ("catalog.gpus.L4=cheap", "L4"),
    ],
)
def test_a_value_that_would_do_nothing_is_refused_by_name(value: str, complaint: str) -> None:
    flag = "--set-json" if "=[" in value else "--set"
    sets = [word for image in IMAGES for word in ("--set", image)]
    done = helm("template", "m", str(CHART), "--kube-version", "1.34.0", *sets, flag, value)
    assert done.returncode != 0
    assert complaint in done.stderr


@pytest.mark.parametrize("image", IMAGES)
def test_a_missing_image_name_is_an_error(image: str) -> None:
    done = helm("template", "m", str(CHART), "--kube-version", "1.34.0", "--set", image)
    assert done.returncode != 0
    assert "image is required: the reference that `make images` prints" in done.stderr


def test_an_upgrade_changes_nothing_that_cannot_be_changed() -> None:
    """A selector that differs, and helm upgrade ends half-way, with the old operator gone."""
    before, after = render(chart=PREVIOUS), render()
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
    assert PREVIOUS.name != f"millstream-{version}.tgz", "a change of the templates is another version of the chart"
    assert operator_of(before)["spec"]["selector"] == operator_of(after)["spec"]["selector"]
    named = [{(d["kind"], d["metadata"]["name"]) for d in documents} for documents in (before, after)]
    assert named[0] <= named[1], "what goes by its name is deleted by an upgrade"
    roles = [{str(binding["roleRef"]) for binding in of_kind(d, "ClusterRoleBinding")} for d in (before, after)]
    assert roles[0] <= roles[1], "a binding's role cannot be changed"


def test_a_newer_crd_takes_every_object_of_the_older_one() -> None:
    """Fields are only added, and no enum loses a value: objects outlive the chart that they were written under."""
    before, after = (fields_of(render("crds.keep=false", chart=chart)) for chart in (PREVIOUS, CHART))
    assert before
    for path, node in before.items():
        assert path in after, f"{path} is gone"
        assert node.get("type") == after[path].get("type"), path
        assert set(node.get("enum", [])) <= set(after[path].get("enum", [])), path
        assert set(after[path].get("required", [])) <= set(node.get("required", [])), path


def fields_of(documents: list[Document]) -> dict[str, Document]:
    """Every node of the CRD's schema, by its path."""
    (crd,) = of_kind(documents, "CustomResourceDefinition")
    found: dict[str, Document] = {}
    waiting = [("", crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"])]
    while waiting:
        path, node = waiting.pop()
        found[path] = node
        waiting += [(f"{path}.{name}", child) for name, child in node.get("properties", {}).items()]
        waiting += [(f"{path}[]", node["items"])] if "items" in node else []
    return found


def test_the_page_of_values_is_what_the_chart_says() -> None:
    assert chart_reference.PAGE.read_text(encoding="utf-8") == chart_reference.page(), "run `make crds`"


def test_every_value_is_explained_where_it_stands() -> None:
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    documented = {value.path: value.text for _, _, values in chart_reference.sections(text) for value in values}
    wanted = {f"{section}.{name}" for section, values in yaml.safe_load(text).items() for name in values}
    assert documented.keys() == wanted
    assert all(documented.values()), [path for path, words in documented.items() if not words]
    assert all(intro for _, intro, _ in chart_reference.sections(text))


def test_every_value_has_a_schema_and_every_schema_a_value() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert set(values) == set(schema["properties"]) - {"global"}
    for name, section in values.items():
        assert schema["properties"][name]["additionalProperties"] is False
        assert set(section) == set(schema["properties"][name]["properties"]), name
