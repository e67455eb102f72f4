"""Which variables the default image takes: CEL and Python give the same verdict, and what is stored keeps serving."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from millstream_operator.api.crd import custom_resource_definition
from millstream_operator.api.load import ManifestError, loads_manifest, parse
from millstream_operator.api.validation.accepted_variables import ACCEPTED
from millstream_operator.api.validation.allowed import Allowed
from millstream_operator.api.validation.ratchets import new_violations
from tests.support.llmdeployments import manifest
from tests.support.stored_objects import edited, refused_by_cel

Manifest = dict[str, Any]
OWN = {"image": "registry.example.com/runtime:1"}
OF_FAMILIES = (
    *(
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        "OTEL_EXPORTER_OTLP_HEADERS",
        "NCCL_IB_HCA",
        "NCCL_P2P_LEVEL",
        "LC_ALL",
        "LC_CTYPE",
    ),
    *("MILLSTREAM_LOG_LEVEL", "MILLSTREAM_LOG_FORMAT"),
)
LIKE_THEM = (
    "LD_LIBRARY_PATH",
    "LC_",
    "XLC_ALL",
    "LC_all",
    "OTEL_EXPORTER",
    "NCCL_IBEXT_DISABLE",
    "NCCL_NET",
    "Tz",
    "http_Proxy",
)


def with_env(*names: str, **spec: Any) -> Manifest:
    env = [{"name": name, "value": "x"} for name in names]
    return manifest(podTemplate={"spec": {"containers": [{"name": "runtime", "env": env}]}}, **spec)


def refused_by_python(new: Manifest, *allowed_env: str) -> list[str]:
    return [violation.message for violation in new_violations(parse(new), Allowed(env=allowed_env))]


@pytest.mark.parametrize("name", [*ACCEPTED, *OF_FAMILIES])
def test_what_loads_no_code_is_taken(name: str) -> None:
    new = with_env(name)
    assert refused_by_cel(new) == refused_by_python(new) == []


@pytest.mark.parametrize("name", LIKE_THEM)
def test_another_name_is_refused_by_name_and_with_the_fix(name: str) -> None:
    new = with_env("ANOTHER", "TZ", name, "LANG")
    (message,) = refused_by_python(new)
    assert refused_by_cel(new) == [message]
    assert message.startswith(f"{name} of podTemplate.spec.containers[].env is not accepted in the default image")
    for fix in ("Leave it out", "runtime.image", "runtime.allowedEnv", "kubectl explain"):
        assert fix in message


def test_a_setting_of_vllm_is_refused_with_the_name_of_our_field() -> None:
    new = with_env("VLLM_API_KEY", "TZ", "VLLM_X")
    (message,) = refused_by_python(new)
    assert refused_by_cel(new) == [message]
    assert "VLLM_API_KEY give auth.apiKeysSecretRef" in message


def test_an_image_of_ones_own_takes_any() -> None:
    new = with_env("LD_PRELOAD", "VLLM_API_KEY", "HOME", runtime=OWN)
    assert refused_by_cel(new) == refused_by_python(new) == []


def test_a_spec_without_an_image_has_the_default_one() -> None:
    specs: tuple[Manifest, ...] = ({"runtime": {"logLevel": "Debug"}}, {"runtime": {}}, {})
    for spec in specs:
        new = with_env("LD_PRELOAD", **spec)
        assert refused_by_cel(new) == refused_by_python(new) != []


def test_an_object_that_leaves_its_own_image_is_judged_as_new() -> None:
    old = with_env("LD_PRELOAD", "VLLM_X", "TZ", runtime=OWN)
    back = edited(old, lambda spec: spec.pop("runtime"))
    assert [message.split(" ")[0] for message in refused_by_cel(back, old)] == ["LD_PRELOAD", "variables"]
    without = edited(back, lambda spec: spec.pop("podTemplate"))
    assert refused_by_cel(without, old) == []


def test_what_is_stored_stays_and_may_be_edited() -> None:
    old = with_env("LD_PRELOAD", "VLLM_X", "TZ")

    def another_value(spec: Manifest) -> None:
        spec["podTemplate"]["spec"]["containers"][0]["env"][0]["value"] = "y"

    def fewer(spec: Manifest) -> None:
        del spec["podTemplate"]["spec"]["containers"][0]["env"][0]

    def an_image(spec: Manifest) -> None:
        spec["runtime"] = OWN

    for change in (lambda spec: spec.update(replicas=2), another_value, fewer, an_image):
        assert refused_by_cel(edited(old, change), old) == []


def test_what_a_stored_object_adds_is_judged() -> None:
    old = with_env("LD_PRELOAD")
    (message,) = refused_by_cel(with_env("LD_PRELOAD", "LD_AUDIT"), old)
    assert message.startswith("LD_AUDIT ")
    for before in (manifest(), manifest(podTemplate={}), manifest(podTemplate={"spec": {"containers": []}})):
        (message,) = refused_by_cel(with_env("LD_PRELOAD"), before)
        assert message.startswith("LD_PRELOAD ")


def test_an_administrator_adds_names_and_no_more() -> None:
    new = with_env("TORCH_LOGS")
    assert refused_by_cel(new, allowed=Allowed(env=["TORCH_LOGS"])) == refused_by_python(new, "TORCH_LOGS") == []
    assert refused_by_cel(new, allowed=Allowed(env=["TORCH_LOG"])) == refused_by_python(new, "TORCH_LOG") != []
    loads_manifest(yaml.safe_dump(new), allowed=Allowed(env=["TORCH_LOGS"]))
    with pytest.raises(ManifestError, match=r"manifest:\d+: spec: TORCH_LOGS of podTemplate"):
        loads_manifest(yaml.safe_dump(new))
    of_vllm = with_env("VLLM_X")
    assert refused_by_cel(of_vllm, allowed=Allowed(env=["VLLM_X"])) == refused_by_python(of_vllm, "VLLM_X") != []


def test_the_crd_says_the_name_of_the_variable() -> None:
    (version,) = custom_resource_definition()["spec"]["versions"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    (rule,) = (one for one in spec["x-kubernetes-validations"] if "messageExpression" in one)
    assert rule["optionalOldSelf"] is True
    assert rule["message"].startswith("a variable of podTemplate.spec.containers[].env is not accepted")
