"""What the operator refuses at its start, helm refuses before; and an upgrade keeps the values of the chart before."""

from __future__ import annotations

import json
import re
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from millstream_operator.catalog.gpu import GpuPart
from millstream_operator.settings import SettingsError, read_settings
from tests.support.helm_chart import (
    CHART,
    PREVIOUS,
    ROOT,
    Document,
    environment,
    helm,
    of_kind,
    operator_of,
    render,
)

LONG = "x" * 64


def settings_problem(documents: list[Document], folder: Path) -> str:
    """What the operator says of the environment and the file that the chart gives it; empty when it starts."""
    (config,) = (one for one in of_kind(documents, "ConfigMap") if "pod-defaults.json" in one["data"])
    (folder / "pod-defaults.json").write_text(config["data"]["pod-defaults.json"])
    given = {name: value for name, value in environment(documents).items() if value is not None}
    given["MILLSTREAM_POD_DEFAULTS"] = str(folder / "pod-defaults.json")
    try:
        read_settings(given)
    except SettingsError as error:
        return str(error)
    return ""


REFUSED_BY_THE_OPERATOR: list[Document] = [
    {"operator": {"watchNamespaces": ["a.b"]}},
    {"operator": {"watchNamespaces": [LONG]}},
    {"operator": {"discoverySeconds": 4}},
    {"operator": {"discoverySeconds": 3601}},
    {"operator": {"recheckSeconds": 1}},
    {"operator": {"recheckSeconds": 3601}},
    {"operator": {"logLevel": "TRACE"}},
    {"runtime": {"image": " "}},
    {"monitoring": {"labels": {"a b": "x"}}},
    {"monitoring": {"labels": {"team": LONG}}},
    {"monitoring": {"labels": {"team": "-x"}}},
    {"monitoring": {"prometheusURL": "http://prometheus:9090?a=b"}},
    {"podDefaults": {"labels": {"team": "two words"}}},
    {"podDefaults": {"labels": {"/team": "x"}}},
    {"podDefaults": {"annotations": {"note": "x" * 4097}}},
    {"podDefaults": {"annotations": {"a note": "x"}}},
    {"podDefaults": {"nodeSelector": {"zone": "a/b"}}},
    {"podDefaults": {"allowedHubs": ["http://hub"]}},
    {"podDefaults": {"allowedHubs": ["hub:8080"]}},
    {"podDefaults": {"tolerations": [{"key": "a b"}]}},
    {"podDefaults": {"tolerations": [{"key": "gpu", "value": "a/b"}]}},
    {"podDefaults": {"tolerations": [{"key": "gpu", "effect": "NoExecute", "tolerationSeconds": 86401}]}},
    {"podDefaults": {"tolerations": [{"key": "gpu", "effect": "NoExecute", "tolerationSeconds": -1}]}},
    {"podDefaults": {"priorityClassName": "High_One"}},
]
AT_THE_BOUNDS: list[Document] = [
    {"operator": {"watchNamespaces": ["x" * 63, "a-1"], "discoverySeconds": 5, "logLevel": "DEBUG"}},
    {"operator": {"recheckSeconds": 2}},
    {"operator": {"recheckSeconds": 3600}},
    {"operator": {"discoverySeconds": 3600}, "inventory": {"mode": "Disabled"}},
    {"monitoring": {"labels": {"a.example/Team_1": "X.y-z", "empty": ""}, "prometheusURL": "https://p:9090/a/b"}},
    {
        "podDefaults": {
            "labels": {"team": "x" * 63},
            "annotations": {"a.example/note": "ü" * 4096, "empty": ""},
            "nodeSelector": {"a.example/zone": ""},
            "tolerations": [
                {"operator": "Exists", "value": ""},
                {"key": "gpu", "operator": "Equal", "value": "", "effect": "NoExecute", "tolerationSeconds": 86400},
            ],
            "priorityClassName": "high.priority",
            "allowedHubs": ["mirror.models.svc", "127.0.0.1", "10.0.0.0/8", "fd00::/8"],
        }
    },
]

OPERATOR_POD = {
    "nodeSelector": {"kubernetes.io/os": "linux", "spot": "true"},
    "tolerations": [{"operator": "Exists"}, {"key": "a.example/b", "effect": "NoExecute", "tolerationSeconds": 600}],
    "priorityClassName": "high.priority",
    "podAnnotations": {"a.example/Note": "ü" * 5000},
    "imagePullSecrets": ["a.b-c"],
    "resources": {
        "requests": {"cpu": 0.5, "memory": 134217728, "hugepages-2Mi": "2Mi"},
        "limits": {"cpu": "1.5", "ephemeral-storage": "1Gi", "hugepages-2Mi": "2Mi", "a.example/Device_1": 1},
    },
}
AT_THE_BOUNDS += [
    {
        "operator": OPERATOR_POD,
        "catalog": {"configMap": "a.b"},
        "serviceMonitor": {"enabled": True, "interval": "1h30s"},
    }
]
REFUSED_BY_THE_API_SERVER: list[Document] = [
    {"operator": {"nodeSelector": {"a b": "x"}}},
    {"operator": {"nodeSelector": {"zone": "a/b"}}},
    {"operator": {"tolerations": [{}]}},
    {"operator": {"tolerations": [{"key": "a b"}]}},
    {"operator": {"tolerations": [{"operator": "Exists", "value": "x"}]}},
    {"operator": {"tolerations": [{"key": "gpu", "effect": "NoSchedule", "tolerationSeconds": 3}]}},
    {"operator": {"priorityClassName": "High One"}},
    {"operator": {"podAnnotations": {"a note": "x"}}},
    {"operator": {"imagePullSecrets": ["a..b"]}},
    {"operator": {"resources": {"requests": {"mem": "1Gi"}}}},
    {"operator": {"resources": {"limits": {"CPU": "1"}}}},
    {"operator": {"resources": {"limits": {"hugepages": "1Gi"}}}},
    {"operator": {"imagePullSecrets": [""]}},
    {"podDefaults": {"tolerations": [{}]}},
    {"podDefaults": {"tolerations": [{"operator": "Equal", "value": "x"}]}},
    {"podDefaults": {"tolerations": [{"operator": "Exists", "value": "x"}]}},
    {"podDefaults": {"tolerations": [{"key": "gpu", "tolerationSeconds": 3}]}},
    {"catalog": {"configMap": "a..b"}},
    {"serviceMonitor": {"enabled": True, "interval": "30m1h"}},
    {"serviceMonitor": {"enabled": True, "interval": "30"}},
]


def render_values(values: Document, folder: Path, *, chart: Path = CHART) -> tuple[list[Document], str]:
    """(documents, what helm refuses) for a values file."""
    file = folder / "values.yaml"
    images = {"operator": {"image": "registry/operator:1"}, "runtime": {"image": "registry/runtime:1"}}
    given = {name: one if one is None else images.get(name, {}) | one for name, one in values.items()}
    file.write_text(yaml.safe_dump(images | given))
    done = helm("template", "millstream", str(chart), "--kube-version", "1.34.0", "-f", str(file))
    return [one for one in yaml.safe_load_all(done.stdout) if one], done.stderr if done.returncode else ""


@pytest.mark.parametrize("values", REFUSED_BY_THE_OPERATOR, ids=lambda values: json.dumps(values)[:60])
def test_helm_refuses_what_the_operator_would_refuse_at_its_start(values: Document, tmp_path: Path) -> None:
    documents, refused = render_values(values, tmp_path)
    assert refused, f"helm takes it, and the operator says: {settings_problem(documents, tmp_path)}"


@pytest.mark.deep
@pytest.mark.parametrize("values", REFUSED_BY_THE_API_SERVER, ids=lambda values: json.dumps(values)[:60])
def test_helm_refuses_what_the_api_server_would_refuse_in_the_middle_of_an_upgrade(
    values: Document, tmp_path: Path
) -> None:
    _, refused = render_values(values, tmp_path)
    assert refused


@pytest.mark.deep
@pytest.mark.parametrize("values", AT_THE_BOUNDS, ids=lambda values: json.dumps(values)[:60])
def test_what_helm_takes_the_operator_starts_with(values: Document, tmp_path: Path) -> None:
    documents, refused = render_values(values, tmp_path)
    assert not refused
    assert settings_problem(documents, tmp_path) == ""


NULLS = (
    "operator.logLevel",
    "operator.imagePullPolicy",
    "operator.watchNamespaces",
    "operator.tolerations",
    "podDefaults",
    "inventory",
    "catalog",
    "monitoring",
    "network",
    "networkPolicy",
    "serviceMonitor",
)


def test_a_value_of_null_is_the_default(tmp_path: Path) -> None:
    """helm drops such a value together with the chart's default for it."""
    values: Document = {}
    for name in NULLS:
        section, _, field = name.partition(".")
        values.setdefault(section, {})[field] = None
        if not field:
            values[section] = None
    documents, refused = render_values(values, tmp_path)
    assert not refused
    assert settings_problem(documents, tmp_path) == ""
    assert without_pod_defaults(documents) == without_pod_defaults(render_values({}, tmp_path)[0])


@pytest.mark.parametrize("section", ["operator", "runtime", "crds"])
def test_a_section_that_has_no_default_is_missed_by_name(section: str, tmp_path: Path) -> None:
    """Without `crds` the upgrade would delete the CRD."""
    _, refused = render_values({section: None}, tmp_path)
    assert f"missing property '{section}'" in refused


def without_pod_defaults(documents: list[Document]) -> list[Document]:
    """An empty object and one with empty fields mean the same."""
    for one in documents:
        one.get("data", {}).pop("pod-defaults.json", None)
        one.get("spec", {}).get("template", {}).get("metadata", {}).pop("annotations", None)
    return documents


def test_the_schema_of_a_gpu_is_that_of_the_catalogue() -> None:
    """Else a price of one's own is refused only by a line in the operator's log, and the old one stays."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    ours = plain(GpuPart.model_json_schema(by_alias=True), "$defs")
    chart = plain(schema["definitions"]["gpu"] | {"definitions": schema["definitions"]}, "definitions")
    assert chart == ours | {"required": []}, "charts/millstream/values.schema.json: definitions.gpu"


def plain(schema: Document, definitions: str) -> Document:
    """A JSON schema without references, titles, defaults, and null as another word for absent; `required` of it."""
    known = schema.get(definitions, {})

    def walk(node: Document) -> Any:
        if "$ref" in node:
            return walk(known[node["$ref"].rpartition("/")[2]])
        if "anyOf" in node:
            (one,) = (inner for inner in node["anyOf"] if inner.get("type") != "null")
            return walk(one)
        kept = {k: v for k, v in node.items() if k not in ("title", "description", "default", "anyOf", definitions)}
        if "properties" in kept:
            kept["properties"] = {name: walk(inner) for name, inner in node["properties"].items()}
        if "items" in kept:
            kept["items"] = walk(node["items"])
        return kept

    found: Document = walk(schema)
    return found | {"required": [] if definitions == "definitions" else found["required"]}


@pytest.fixture
def previous(tmp_path: Path) -> Path:
    """The previous chart, unpacked."""
    with tarfile.open(PREVIOUS) as archive:
        archive.extractall(tmp_path / "previous", filter="data")
    return tmp_path / "previous" / "millstream"


def test_every_value_of_the_previous_chart_is_taken(previous: Path, tmp_path: Path) -> None:
    """A copy of the old values.yaml that was edited and is given with -f, as --reset-then-reuse-values does."""
    values = yaml.safe_load((previous / "values.yaml").read_text())
    for section in ("operator", "runtime"):
        del values[section]["image"]  # empty; every release names its own
    documents, refused = render_values(values, tmp_path)
    assert not refused
    assert documents == render_values({}, tmp_path)[0]


def without_resources(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Old values keep the old requests and limits of the operator: that is what reusing values means."""
    for one in documents:
        for container in one.get("spec", {}).get("template", {}).get("spec", {}).get("containers", ()):
            container.pop("resources", None)
    return documents


def test_values_that_are_new_may_be_missing_altogether(previous: Path, tmp_path: Path) -> None:
    """`helm upgrade --reuse-values` puts the old chart's defaults in the place of the new one's."""
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)
    shutil.copy(previous / "values.yaml", chart / "values.yaml")
    documents, refused = render_values({}, tmp_path, chart=chart)
    assert not refused, "a template reads a section that the previous values.yaml lacks: (.Values.section).name"
    assert without_resources(documents) == without_resources(render_values({}, tmp_path)[0])
    assert settings_problem(documents, tmp_path) == ""


def test_a_version_with_build_metadata_makes_valid_labels(tmp_path: Path) -> None:
    """The API server refuses a label value with a plus sign or more than 63 characters."""
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    build = f"+build.7.sha-{'0123456789abcdef' * 4}"
    about |= {"version": about["version"] + build, "appVersion": about["appVersion"] + build}
    (chart / "Chart.yaml").write_text(yaml.safe_dump(about))
    documents = render(chart=chart)
    labels = [one["metadata"]["labels"] for one in documents if "labels" in one["metadata"]]
    labels.append(operator_of(documents)["spec"]["template"]["metadata"]["labels"])
    for value in (value for found in labels for value in found.values()):
        assert re.fullmatch(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?", value), value
        assert len(value) <= 63
    assert labels[-1]["helm.sh/chart"].startswith("millstream-0.2.0_build.7")


def test_documented_upgrades_keep_the_values() -> None:
    """`helm upgrade` with --set alone resets every other value to its default."""
    pages = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", CHART / "templates" / "NOTES.txt"]
    commands = [
        line for page in pages for line in page.read_text(encoding="utf-8").splitlines() if "helm upgrade" in line
    ]
    assert commands
    for line in commands:
        assert re.search(r"--reset-then-reuse-values|--install| -f |--values ", line), line


def test_the_notes_say_how_to_upgrade_and_keep_the_values(tmp_path: Path) -> None:
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)
    shown = 'kind: Notes\nmetadata: {}\ntext: {{ include "millstream/templates/NOTES.txt" . | toJson }}\n'
    (chart / "templates" / "notes.yaml").write_text(shown)  # helm shows the notes themselves only beside a cluster
    (notes,) = of_kind(render(chart=chart), "Notes")
    assert "helm upgrade millstream CHART --namespace system --reset-then-reuse-values" in notes["text"]
