"""Where the model's files come from: a folder of the image, a volume, or a download before the runtime starts."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.arguments import CommandLineParser
from millstream.source_arguments import add_source_arguments
from millstream_operator.planning.plan import PlanDefaults
from millstream_operator.planning.planner import plan
from millstream_operator.rendering.network_policy import network_policy
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.pod_template import pod_template
from millstream_operator.rendering.runtime_config import boot_config
from tests.support.llmdeployments import deployment

TOKEN = {"tokenSecretRef": {"name": "hub", "key": "reader"}}
ENV = [{"name": "HF_ENDPOINT", "value": "http://hub.example"}]


def pod(source: dict[str, Any], **spec: Any) -> dict[str, Any]:
    owner = deployment(model={"source": source}, **spec)
    found: dict[str, Any] = pod_template(owner, plan(owner, PlanDefaults("runtime:1")), PodDefaults())["spec"]
    return found


def hub(**fields: Any) -> dict[str, Any]:
    return {"huggingFace": {"repository": "org/name", **fields}}


def served_folder(source: dict[str, Any]) -> str:
    return boot_config(plan(deployment(model={"source": source}), PlanDefaults("runtime:1"))).model


def test_a_local_model_adds_nothing() -> None:
    spec = pod({"local": {"path": "demo-chat"}})
    assert "initContainers" not in spec
    assert [volume["name"] for volume in spec["volumes"]] == ["tmp", "config"]


def test_a_volume_is_mounted_to_be_read_and_its_folder_is_served() -> None:
    source = {"persistentVolumeClaim": {"claimName": "models", "path": "/chat/v1/"}}
    spec = pod(source)
    volume = next(volume for volume in spec["volumes"] if volume["name"] == "model")
    assert volume["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    mount = next(mount for mount in spec["containers"][0]["volumeMounts"] if mount["name"] == "model")
    assert mount["readOnly"] is True
    assert served_folder(source) == f"{mount['mountPath']}/chat/v1"
    assert served_folder({"persistentVolumeClaim": {"claimName": "models"}}) == mount["mountPath"]


def test_a_hub_model_is_downloaded_to_where_the_runtime_reads_it() -> None:
    spec = pod(hub(revision="v1"))
    (fetch,) = spec["initContainers"]
    verb, *flags = fetch["args"]
    parser = CommandLineParser(prog="fetch")
    add_source_arguments(parser)
    parser.add_argument("--into")
    given = parser.parse_args(flags)  # the verb's own flags: a word that it does not know ends the test
    assert (verb, given.hugging_face, given.revision) == ("fetch", "org/name", "v1")
    assert given.into == served_folder(hub(revision="v1"))
    assert fetch["image"] == spec["containers"][0]["image"]
    writable = {mount["mountPath"]: not mount.get("readOnly", False) for mount in fetch["volumeMounts"]}
    assert writable[given.into], "the download writes there"
    mounts = {mount["mountPath"]: mount for mount in spec["containers"][0]["volumeMounts"]}
    assert mounts[given.into]["readOnly"] is True, "and the server reads only"


def test_without_a_revision_the_download_is_of_main() -> None:
    assert "--revision=main" in pod(hub())["initContainers"][0]["args"]


def test_a_token_is_a_file_and_in_no_argument() -> None:
    spec = pod(hub(**TOKEN))
    (fetch,) = spec["initContainers"]
    volume = next(volume for volume in spec["volumes"] if volume["name"] == "hub-token")
    assert volume["secret"]["secretName"] == "hub"
    assert volume["secret"]["items"] == [{"key": "reader", "path": "token"}]
    folder = next(mount["mountPath"] for mount in fetch["volumeMounts"] if mount["name"] == "hub-token")
    assert f"--token-file={folder}/token" in fetch["args"]
    served = [mount["name"] for mount in spec["containers"][0]["volumeMounts"]]
    assert "hub-token" not in served, "the server has no use for it"


def test_the_download_has_the_runtimes_environment_so_a_mirror_and_a_proxy_hold_for_it() -> None:
    template = {"spec": {"containers": [{"name": "runtime", "env": ENV}]}}
    assert pod(hub(), podTemplate=template)["initContainers"][0]["env"][1:] == ENV


@pytest.mark.parametrize(("source", "open_to_all"), [(hub(), True), ({"local": {"path": "demo-chat"}}, False)])
def test_only_a_pod_that_downloads_may_call_out(source: dict[str, Any], open_to_all: bool) -> None:
    egress = network_policy(deployment(model={"source": source}))["spec"]["egress"]
    assert ({"ports": [{"protocol": "TCP"}]} in egress) is open_to_all
