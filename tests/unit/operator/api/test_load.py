"""Bad manifests: each gets one sentence that names the place, the value and what may stand there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from millstream_operator.api.load import (
    MAX_ERRORS,
    MAX_MANIFEST_BYTES,
    ManifestError,
    load_manifest,
    loads_manifest,
    manifest_errors,
    parse,
)
from tests.support.llmdeployments import full_manifest, manifest

GOOD = """\
apiVersion: millstream.dev/v1alpha1
kind: LLMDeployment
metadata:
  name: demo
spec:
  model:
    source:
      local: {path: demo-chat}
"""
HEAD = "apiVersion: millstream.dev/v1alpha1\nkind: LLMDeployment\nmetadata: {name: demo}\n"


def spec(text: str) -> str:
    """GOOD with more fields in its spec, from line 9 on."""
    return GOOD + "".join(f"  {line}\n" for line in text.splitlines())


def metadata(text: str) -> str:
    """GOOD with another line in its metadata, the fifth."""
    return GOOD.replace("  name: demo\n", f"  name: demo\n  {text}\n")


def template(text: str) -> str:
    return spec("podTemplate:\n  spec:\n" + "".join(f"    {line}\n" for line in text.splitlines()))


REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
# name: (manifest, what the sentence must hold)
BAD: dict[str, tuple[str, list[str]]] = {
    # The text
    "empty": ("", ["empty", "LLMDeployment"]),
    "comment only": ("# nothing\n", ["empty"]),
    "malformed": ("a: [1, 2\nb: 3\n", ["malformed YAML", "line 2"]),
    "tab": ("a:\n\tb: 1\n", ["malformed YAML", "line 2", "a tab", "spaces"]),
    "template": (HEAD.replace("demo}", "{{ .Release.Name }}}"), ["m.yaml:3", "template", "rendered"]),
    "list of kubectl": ("kind: List\napiVersion: v1\nitems: []\n", ["found List", "one of its items"]),
    "control character": ("a: \x00\n", ["malformed YAML", "not allowed"]),
    "unknown alias": ("a: *nowhere\n", ["malformed YAML", "nowhere"]),
    "alias in itself": ("a: &a [*a]\n", ["alias that contains itself"]),
    "a scalar": ("just words\n", ["expected kind LLMDeployment", "no object"]),
    "a list": ("- 1\n", ["expected kind LLMDeployment", "no object"]),
    "python tag": (spec("replicas: !!python/object/apply:os.system [ls]"), ["m.yaml:9", "!!python"]),
    "python name": (spec("replicas: !!python/name:os.system"), ["m.yaml:9", "!!python"]),
    "binary": (spec("replicas: !!binary aGVsbG8="), ["m.yaml:9", "!!binary"]),
    "set": (spec("engine: !!set {maxNumSeqs}"), ["m.yaml:9", "!!set"]),
    "an int that is none": (spec("replicas: !!int many"), ["m.yaml:9", "many"]),
    "an int of nothing": (spec("replicas: !!int ''"), ["m.yaml:9", "'' is no int"]),
    "a bool that is none": (spec("replicas: !!bool maybe"), ["m.yaml:9", "'maybe' is no bool"]),
    "minutes and seconds": (spec("engine: {maxModelLen: 1:30}"), ['spec.engine.maxModelLen is "1:30"', "whole number"]),
    "an int beyond all bounds": (spec(f"replicas: {'9' * 5000}"), ["m.yaml:9", "9999"]),
    "not a number": (spec("replicas: .nan"), ["spec.replicas", "NaN"]),
    "half a surrogate pair": (spec('runtime: {image: "a\\ud800"}'), ["m.yaml:9", "surrogate"]),
    "deep": ("a:\n  " + "[" * 600, ["m.yaml:2", "nested deeper than 64"]),
    "rather deep": (spec("engine: " + "{a: " * 230 + "1" + "}" * 230), ["m.yaml:9", "nested deeper than 64"]),
    # Which document
    "another kind": ("kind: Deployment\napiVersion: apps/v1\n", ["expected kind LLMDeployment", "Deployment"]),
    "two of ours": (GOOD + "---\n" + GOOD, ["holds 2 LLMDeployments", "one file to each"]),
    "wrong version": (GOOD.replace("v1alpha1", "v1"), ["apiVersion", '"millstream.dev/v1"', "millstream.dev/v1alpha1"]),
    "wrong kind of ours": (GOOD.replace("kind: LLMDeployment", "kind: LLMdeployment"), ["kind", "LLMDeployment"]),
    "no kind": (GOOD.replace("kind: LLMDeployment\n", ""), ["kind: missing"]),
    # Keys
    "duplicate key": (spec("replicas: 1\nreplicas: 2"), ["m.yaml:10", "'replicas'", "given twice"]),
    "duplicate key deep": (spec("engine: {maxNumSeqs: 1, maxNumSeqs: 2}"), ["m.yaml:9", "'maxNumSeqs'"]),
    "key that is a list": (spec("[1]: 2"), ["m.yaml:9", "no string"]),
    "merge key": (spec("<<: {replicas: 2}"), ["spec.<<: unknown field"]),
    "misspelled": (spec("engine: {maxNumSeq: 8}"), ["m.yaml:9", "spec.engine.maxNumSeq", "did you mean maxNumSeqs"]),
    "snake case inside": (spec("engine: {max_num_seqs: 8}"), ["spec.engine.max_num_seqs", "mean maxNumSeqs"]),
    "snake case": (spec("pod_template: {}"), ["spec.pod_template", "did you mean podTemplate"]),
    "misspelled and required": (
        GOOD.replace("path:", "paht:"),
        ["m.yaml:8", "spec.model.source.local.paht", "did you mean path"],
    ),
    "unlike any field": (spec("engine: {zzz: 8}"), ["spec.engine.zzz: unknown field", "maxModelLen"]),
    "unknown at the top": (GOOD + "sepc: {}\n", ["sepc", "did you mean spec"]),
    "unknown in metadata": (GOOD.replace("name: demo", "nmae: demo"), ["metadata.nmae", "did you mean name"]),
    "unknown in a list": (
        template("tolerations:\n- {kye: spot}"),
        ["spec.podTemplate.spec.tolerations[0].kye", "did you mean key"],
    ),
    "known elsewhere": (GOOD + "replicas: 2\n", ["replicas: unknown field; it belongs at spec.replicas."]),
    "indented too far": (spec("  accelerator: {type: CPU}"), ["it belongs at spec.accelerator"]),
    # Values
    "bad name": (GOOD.replace("name: demo", "name: Demo_1"), ['m.yaml:4: metadata.name is "Demo_1"; it must be a DNS']),
    "number for a name": (GOOD.replace("name: demo", "name: 1"), ["metadata.name is 1", "put it in quotes"]),
    "no spec": (HEAD, ["spec: missing"]),
    "empty spec": (HEAD + "spec:\n", ["spec is empty"]),
    "no model": (HEAD + "spec: {replicas: 1}\n", ["spec.model: missing"]),
    "null": (spec("replicas:"), ["m.yaml:9", "spec.replicas is empty", "leave it out"]),
    "wrong enum": (spec("accelerator: {type: TPU}"), ["spec.accelerator.type", '"TPU"', "GPU or CPU"]),
    "enum in small letters": (spec("service: {type: nodeport}"), ["spec.service.type", "NodePort"]),
    "negative": (spec("replicas: -1"), ["m.yaml:9", "spec.replicas is -1", "greater than or equal to 0"]),
    "too large": (spec("replicas: 1001"), ["spec.replicas is 1001", "less than or equal to 1000"]),
    "float for int": (spec("replicas: 1.5"), ["spec.replicas is 1.5", "whole number"]),
    "whole float for int": (spec("replicas: 2.0"), ["spec.replicas is 2.0", "whole number"]),
    "string for int": (spec("replicas: '2'"), ["spec.replicas", '"2"', "whole number"]),
    "bool for int": (spec("replicas: yes"), ["spec.replicas is true", "whole number"]),
    "list for object": (spec("engine: [1]"), ["spec.engine is [1]", "object"]),
    "string for object": (spec("engine: fast"), ["spec.engine", '"fast"', "object"]),
    "int for string": (spec("runtime: {image: 1}"), ["spec.runtime.image is 1", "string"]),
    "date for string": (spec("runtime: {image: 2024-01-01 10:00:00}"), ["spec.runtime.image", '"2024-01-01 10:00:00"']),
    "no duration": (spec("warmup: {timeout: soon}"), ["spec.warmup.timeout", '"soon"', "20m"]),
    "number for duration": (spec("warmup: {timeout: 90}"), ["spec.warmup.timeout is 90", "such as 30s", "string"]),
    "milliseconds": (spec("warmup: {timeout: 500ms}"), ["spec.warmup.timeout", '"500ms"', "30s"]),
    "too long a duration": (spec("warmup: {timeout: 25h}"), ["m.yaml:9", "spec.warmup.timeout", "24h"]),
    "path that climbs": (GOOD.replace("demo-chat", "../etc"), ["spec.model.source.local.path", '"../etc"', "'..'"]),
    "hidden folder": (GOOD.replace("demo-chat", "/models/.git"), ["spec.model.source.local.path", ".git"]),
    "bad image": (spec("runtime: {image: 'Registry/Image'}"), ["spec.runtime.image", "registry.example.com"]),
    "port": (spec("service: {port: 70000}"), ["spec.service.port is 70000", "65535"]),
    "cpu float": (
        template("containers:\n- {name: runtime, resources: {requests: {cpu: 0.5}}}"),
        ["containers[0].resources.requests.cpu is 0.5", "in quotes"],
    ),
    "cpu nonsense": (
        template("containers:\n- {name: runtime, resources: {requests: {cpu: lots}}}"),
        ["containers[0].resources.requests.cpu", '"lots"', "500m"],
    ),
    "memory negative": (
        template("containers:\n- {name: runtime, resources: {limits: {memory: -1}}}"),
        ["containers[0].resources.limits.memory is -1", "greater than or equal to 0"],
    ),
    "another container": (template("containers:\n- name: sidecar"), ["containers[0].name", '"sidecar"', "runtime"]),
    "two containers": (
        template("containers:\n- name: runtime\n- name: runtime"),
        ["spec.podTemplate.spec.containers", "at most 1 item"],
    ),
    "an empty list": (spec("network: {ingress: []}"), ["spec.network.ingress is []; it must have at least 1 item."]),
    "an empty string": (spec("accelerator: {products: ['']}"), ["it must have at least 1 character."]),
    "a long string": (
        spec(f"podTemplate: {{metadata: {{labels: {{team: {'a' * 64}}}}}}}"),
        ["spec.podTemplate.metadata.labels.team", "it must have at most 63 characters."],
    ),
    "a large map": (
        template(
            "affinity: {podAffinity: {requiredDuringSchedulingIgnoredDuringExecution: [{topologyKey: zone, "
            f"labelSelector: {{matchLabels: {{{', '.join(f'k{number}: v' for number in range(9))}}}}}}}]}}}}"
        ),
        ["labelSelector.matchLabels is", "it must have at most 8 items."],
    ),
    "no namespace": (
        template(
            "affinity: {podAffinity: {requiredDuringSchedulingIgnoredDuringExecution: [{topologyKey: zone, "
            "namespaces: [Team]}]}}"
        ),
        ["namespaces[0]", '"Team"', "the name of a namespace"],
    ),
    "label value": (
        spec("podTemplate: {metadata: {labels: {team: 'a b'}}}"),
        ["spec.podTemplate.metadata.labels.team", '"a b"'],
    ),
    "label value of a key named text": (
        spec("podTemplate: {metadata: {labels: {text: 5}}}"),
        ["spec.podTemplate.metadata.labels.text is 5", "string"],
    ),
    "label key": (
        spec("podTemplate: {metadata: {labels: {'a b': x}}}"),
        ["spec.podTemplate.metadata.labels", '"a b"', "example.com/team"],
    ),
    # Metadata, which the API server checks in every object
    "label of the object": (
        metadata("labels: {app: my app}"),
        ["m.yaml:5", 'metadata.labels.app is "my app"', "label's"],
    ),
    "label key of the object": (
        metadata("labels: {my app: x}"),
        ["m.yaml:5", 'metadata.labels: the key "my app"', "example.com/team"],
    ),
    "long label of the object": (
        metadata(f"labels: {{app: {'a' * 64}}}"),
        ["metadata.labels.app", "at most 63 characters"],
    ),
    "annotation key": (
        metadata("annotations: {my note: x}"),
        ['metadata.annotations: the key "my note"', "example.com/team"],
    ),
    "large annotations": (
        metadata(f"annotations: {{a: {'x' * 300_000}}}"),
        ["m.yaml:5", "metadata.annotations", "262144"],
    ),
    "namespace": (
        metadata("namespace: My_Team"),
        ["m.yaml:5", 'metadata.namespace is "My_Team"', "name of a namespace"],
    ),
    "empty namespace": (metadata("namespace: ''"), ["metadata.namespace", "at least 1 character"]),
    "long namespace": (metadata(f"namespace: {'n' * 64}"), ["metadata.namespace", "at most 63 characters"]),
    # Rules across fields (tests/unit/operator/api/test_rules.py has all of them)
    "no name": (GOOD.replace("metadata:\n  name: demo\n", "metadata: {}\n"), ["metadata.name: missing"]),
    "name too long": (GOOD.replace("name: demo", f"name: {'d' * 53}"), ["metadata.name", "52 characters"]),
    "name of no Service": (GOOD.replace("name: demo", "name: 1-demo"), ["metadata.name", "starts with a letter"]),
    "no repository": (
        GOOD.replace("local: {path: demo-chat}", "huggingFace: {repository: name}"),
        ["m.yaml:8", "spec.model.source.huggingFace.repository", '"name"', "org/name"],
    ),
    "no latency": (spec("objectives: {ttft: {p95: soon}}"), ["spec.objectives.ttft.p95", '"soon"', "200ms"]),
    "name that ends with a line": (
        GOOD.replace("name: demo", 'name: "demo\\n"'),
        ["m.yaml:4", "metadata.name", "a DNS"],
    ),
    "too long a time": (spec("warmup: {timeout: 25h}"), ['spec.warmup.timeout is "25h"; it must be a duration', "24h"]),
    "a variable twice": (
        template("containers: [{name: runtime, env: [{name: A, value: x}, {name: B}, {name: A, value: y}]}]"),
        ["m.yaml:11", "spec.podTemplate.spec.containers[0].env", "the name A is given twice"],
    ),
    "a pull secret twice": (
        template("imagePullSecrets: [{name: a}, {name: a}]"),
        ["m.yaml:11", "spec.podTemplate.spec.imagePullSecrets", "the name a is given twice"],
    ),
    "a number for a list": (
        template("tolerations: 1"),
        ["m.yaml:11", "spec.podTemplate.spec.tolerations is 1", "a list"],
    ),
    "a key with a long name": (
        template(f"affinity:\n  podAffinity:\n    {REQUIRED}: [{{topologyKey: {'x' * 64}}}]"),
        ["m.yaml:13", "topologyKey is", "a name of at most 63 characters"],
    ),
    "no source": (GOOD.replace("      local: {path: demo-chat}", "      {}"), ["spec.model.source", "exactly one"]),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_manifest_is_reported_in_one_sentence(name: str) -> None:
    text, held = BAD[name]
    with pytest.raises(ManifestError) as caught:
        loads_manifest(text, source="m.yaml")
    said = str(caught.value)
    assert said.startswith("m.yaml"), said
    assert "\n" not in said
    assert said.endswith((".", ")")), said
    assert len(said) < 600, said
    assert "should " not in said, "Pydantic's words"
    for part in held:
        assert part in said, said


def test_a_billion_laughs_are_not_unfolded() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    with pytest.raises(ManifestError, match="expands to more than"):
        loads_manifest("\n".join(lines))


def test_one_long_string_repeated_by_aliases_is_not_unfolded() -> None:
    """Few values, but a large file of them would be gigabytes of JSON."""
    text = f"a: &a {'x' * 50_000}\nb: [{', '.join(['*a'] * 100)}]\n"
    with pytest.raises(ManifestError, match="expands to more than"):
        loads_manifest(text)


def _too_large(path: Path) -> None:
    path.write_text(GOOD + "#" * MAX_MANIFEST_BYTES)


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "absent": (lambda path: None, "No such file"),
    "folder": (lambda path: path.mkdir(), "Is a directory"),
    "too large": (_too_large, "larger than 3 MiB"),
    "not text": (lambda path: path.write_bytes(b"\x89PNG\r\n\x1a\n\xff"), "UTF-8"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_read_is_reported_by_its_name(tmp_path: Path, name: str) -> None:
    make, said = FILES[name]
    path = tmp_path / "m.yaml"
    make(path)
    with pytest.raises(ManifestError) as caught:
        load_manifest(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert said in str(caught.value)


def test_a_file_may_hold_other_documents(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(f"kind: Namespace\napiVersion: v1\n---\n{GOOD}---\n# the end\n")
    assert load_manifest(path).name == "demo"


def test_json_is_yaml_too() -> None:
    text = '{"apiVersion": "millstream.dev/v1alpha1", "kind": "LLMDeployment", "metadata": {"name": "demo"},'
    assert loads_manifest(text + '"spec": {"model": {"source": {"local": {"path": "m"}}}}}').spec.replicas == 1


def test_json_escapes_what_lies_beyond_16_bits_as_a_pair() -> None:
    text = '{"apiVersion": "millstream.dev/v1alpha1", "kind": "LLMDeployment", "metadata": {"name": "demo"}, "spec": '
    text += (
        '{"model": {"source": {"local": {"path": "m"}}}, "podTemplate": {"metadata": {"annotations": {"a": "PAIR"}}}}}'
    )
    template = loads_manifest(text.replace("PAIR", "\\ud83d\\ude00")).spec.pod_template
    assert template is not None
    assert template.metadata is not None
    assert template.metadata.annotations == {"a": "\N{GRINNING FACE}"}
    with pytest.raises(ManifestError, match="half of a surrogate pair"):
        loads_manifest(text.replace("PAIR", "\\ud83d"))


def test_an_alias_may_be_used_as_in_kubectl() -> None:
    deployment = loads_manifest(spec("warmup: {timeout: &t 15m, heartbeatInterval: *t}"))
    assert deployment.spec.warmup is not None
    assert deployment.spec.warmup.heartbeat_interval == "15m"


def test_the_served_name_is_the_objects_own_unless_given() -> None:
    assert loads_manifest(GOOD).served_name == "demo"
    assert parse(full_manifest()).served_name == "chat"


def test_a_stored_object_is_read_with_everything_that_a_server_adds_to_its_metadata() -> None:
    stored = manifest()
    stored["metadata"] |= {
        "generateName": "demo-",
        "creationTimestamp": "2025-01-01T00:00:00Z",
        "labels": {"argocd.argoproj.io/instance": "models"},
        "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}"},
        "managedFields": [{"manager": "kubectl", "operation": "Apply", "fieldsV1": {"f:spec": {}}}],
        "finalizers": ["foregroundDeletion"],
        "ownerReferences": [{"apiVersion": "v1", "kind": "ConfigMap", "name": "x", "uid": "y"}],
        "deletionTimestamp": "2025-01-01T00:00:00Z",
        "deletionGracePeriodSeconds": 0,
        "selfLink": "/apis/millstream.dev/v1alpha1/namespaces/team/llmdeployments/demo",
    }
    assert parse(stored).name == "demo"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEAD + "spec:\n", "m.yaml:4: spec is empty; give it a value."),
        (GOOD.replace("name: demo", "name:"), "m.yaml:4: metadata.name is empty; give it a value."),
        (GOOD.replace("local: {path: demo-chat}", "local: {path: }"), "source.local.path is empty; give it a value."),
        (template("containers: [{name: }]"), "containers[0].name is empty; give it a value."),
        (GOOD.replace("local: {path: demo-chat}", "local:"), "exactly one source"),
        (spec("engine: {maxNumSeqs: }\nreplicas:"), "spec.replicas is empty; give it a value or leave it out."),
    ],
)
def test_an_empty_field_is_to_be_left_out_only_where_it_may(text: str, said: str) -> None:
    with pytest.raises(ManifestError) as caught:
        loads_manifest(text, source="m.yaml")
    assert said in str(caught.value)


def test_annotations_may_have_keys_with_a_prefix_in_capitals() -> None:
    """As the API server takes them, which labels may not have."""
    assert loads_manifest(metadata("annotations: {Example.COM/note: x}")).metadata.annotations == {
        "Example.COM/note": "x"
    }
    with pytest.raises(ManifestError, match=r"metadata.labels: the key"):
        loads_manifest(metadata("labels: {Example.COM/note: x}"))


def test_an_error_in_a_stored_object_names_no_file() -> None:
    with pytest.raises(ManifestError, match=r"^spec\.replicas is -1; "):
        parse(manifest(replicas=-1))


def errors_of(path: Path, text: str) -> list[str]:
    path.write_text(text)
    return [str(error).removeprefix(str(path)) for error in manifest_errors(path)]


def test_all_errors_of_all_documents_are_listed_by_line(tmp_path: Path) -> None:
    """GOOD ends on line 8, so its second copy begins on line 13, behind a separator on line 12."""
    several = spec("replicas: -1\nservice: {port: 70000}\nengine: {maxNumSeq: 8}")
    rules = GOOD.replace("name: demo", "name: Demo") + "  warmup: {timeout: 25h}\n"
    said = errors_of(tmp_path / "m.yaml", f"{several}---\nkind: Secret\n---\n{rules}")
    assert [one.split(" ")[0] for one in said] == [
        ":9:",
        ":10:",
        ":11:",
        ":18:",
        ":23:",
    ]
    for part, error in zip(("replicas", "port", "mean maxNumSeqs", '"Demo"', "timeout"), said, strict=True):
        assert part in error


def test_a_misspelled_required_field_is_one_error(tmp_path: Path) -> None:
    said = errors_of(tmp_path / "m.yaml", GOOD.replace("path:", "paht:"))
    assert said == [":8: spec.model.source.local.paht: unknown field; did you mean path."]
    said = errors_of(tmp_path / "m.yaml", GOOD.replace("path:", "zzz:"))
    assert len(said) == 2, "nothing says that zzz was meant as path"


def test_what_is_malformed_hides_no_error_of_another_document(tmp_path: Path) -> None:
    bad, twice = spec("replicas: -1"), spec("replicas: 1\nreplicas: 2")
    said = errors_of(tmp_path / "m.yaml", f"{bad}---\n{twice}---\na: [1\nb: 2\n")
    assert [one.split(" ")[0] for one in said] == [":9:", ":20:", ":"]
    assert "given twice" in said[1]
    assert "malformed YAML on line 23" in said[2]


def test_a_file_of_errors_ends_with_their_number(tmp_path: Path) -> None:
    said = errors_of(tmp_path / "m.yaml", GOOD + "".join(f"x{number}: 1\n" for number in range(MAX_ERRORS + 7)))
    assert len(said) == MAX_ERRORS + 1
    assert said[-1] == ": 7 more errors are not shown."


@pytest.mark.parametrize("name", BAD)
def test_the_first_error_is_among_all(name: str, tmp_path: Path) -> None:
    if name == "two of ours":
        assert errors_of(tmp_path / "m.yaml", BAD[name][0]) == []
        return
    path = tmp_path / "m.yaml"
    said = errors_of(path, BAD[name][0])
    with pytest.raises(ManifestError) as caught:
        loads_manifest(BAD[name][0], source=str(path))
    assert str(caught.value).removeprefix(str(path)) in said
