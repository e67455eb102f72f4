"""Where the model's files come from: a folder of the image, a volume, or a download before the runtime starts."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.arguments import CommandLineParser
from millstream.source_arguments import add_source_arguments
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.plan import PlanDefaults
from millstream_operator.planning.spec_plan import plan_from_spec
from millstream_operator.rendering.model_cache import model_cache
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.pod_template import pod_template
from millstream_operator.rendering.runtime_config import boot_config
from tests.support.llmdeployments import deployment

TOKEN = {"tokenSecretRef": {"name": "hub", "key": "reader"}}
IMAGE = {"image": {"reference": "registry.example.com/model:1"}}
COMMIT, DIGEST = "0123456789abcdef0123456789abcdef01234567", "sha256:" + "ab" * 32
ENV = [{"name": "HF_ENDPOINT", "value": "http://hub.example"}]


def pod(
    source: dict[str, Any], facts: Facts | None = None, cache: dict[str, Any] | None = None, **spec: Any
) -> dict[str, Any]:
    owner = deployment(model={"source": source} | ({"cache": cache} if cache else {}), **spec)
    found: dict[str, Any] = pod_template(owner, plan_from_spec(owner, PlanDefaults("runtime:1"), facts), PodDefaults())[
        "spec"
    ]
    return found


def hub(**fields: Any) -> dict[str, Any]:
    return {"huggingFace": {"repository": "org/name", **fields}}


def served_folder(source: dict[str, Any], facts: Facts | None = None, cache: dict[str, Any] | None = None) -> str:
    owner = deployment(model={"source": source} | ({"cache": cache} if cache else {}))
    return boot_config(plan_from_spec(owner, PlanDefaults("runtime:1"), facts)).model


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


def test_one_of_several_gguf_files_has_a_folder_of_its_own() -> None:
    """In the pod's arguments as it is written; in a path as two dashes."""
    source = {"huggingFace": {"repository": "org/name-GGUF:Q4_K_M"}}
    assert "--hugging-face=org/name-GGUF:Q4_K_M" in pod(source)["initContainers"][0]["args"]
    other = {"huggingFace": {"repository": "org/name-GGUF:Q8_0"}}
    cached = [served_folder(one, cache={"size": "9Gi"}) for one in (source, other)]
    assert cached[0] != cached[1]
    assert ":" not in cached[0]


def test_without_a_revision_the_download_is_of_main() -> None:
    assert "--revision=main" in pod(hub())["initContainers"][0]["args"]


def test_a_token_is_a_file_and_in_no_argument() -> None:
    spec = pod(hub(**TOKEN))
    (fetch,) = spec["initContainers"]
    volume = next(volume for volume in spec["volumes"] if volume["name"] == "hub-token")
    assert volume["secret"]["secretName"] == "hub"
    assert volume["secret"]["items"] == [{"key": "reader", "path": "hub/reader"}]
    assert volume["secret"]["optional"] is True, "or the kubelet would wait for it without a word"
    folder = next(mount["mountPath"] for mount in fetch["volumeMounts"] if mount["name"] == "hub-token")
    assert f"--token-file={folder}/hub/reader" in fetch["args"], "so the message names Secret and key"
    served = [mount["name"] for mount in spec["containers"][0]["volumeMounts"]]
    assert "hub-token" not in served, "the server has no use for it"


def test_the_download_has_the_runtimes_environment_so_a_mirror_and_a_proxy_hold_for_it() -> None:
    template = {"spec": {"containers": [{"name": "runtime", "env": ENV}]}}
    assert pod(hub(), podTemplate=template)["initContainers"][0]["env"][1:] == ENV


def volume_of(spec: dict[str, Any], name: str = "model") -> dict[str, Any]:
    found: dict[str, Any] = next(volume for volume in spec["volumes"] if volume["name"] == name)
    return found


def test_what_was_resolved_is_what_every_pod_downloads() -> None:
    (fetch,) = pod(hub(revision="main"), Facts(model_revision=COMMIT))["initContainers"]
    assert f"--revision={COMMIT}" in fetch["args"]


def test_an_image_is_pulled_by_digest_with_the_pods_own_logins() -> None:
    template = {"spec": {"imagePullSecrets": [{"name": "one"}, {"name": "two"}]}}
    spec = pod(IMAGE, Facts(model_revision=DIGEST), podTemplate=template)
    (fetch,) = spec["initContainers"]
    verb, *flags = fetch["args"]
    parser = CommandLineParser(prog="fetch")
    add_source_arguments(parser)
    parser.add_argument("--into")
    given = parser.parse_args(flags)
    assert (verb, given.image) == ("fetch", f"registry.example.com/model:1@{DIGEST}")
    assert given.into == served_folder(IMAGE) == "/models/image"
    projected = volume_of(spec, "registry-logins")["projected"]["sources"]
    folder = next(mount["mountPath"] for mount in fetch["volumeMounts"] if mount["name"] == "registry-logins")
    paths = [f"{folder}/{source['secret']['items'][0]['path']}" for source in projected]
    assert [str(path) for path in given.docker_config] == paths
    assert [source["secret"]["items"][0]["key"] for source in projected] == [".dockerconfigjson"] * 2
    assert "registry-logins" not in [mount["name"] for mount in spec["containers"][0]["volumeMounts"]]


def test_a_reference_that_is_a_digest_already_stays() -> None:
    reference = f"registry.example.com/model@{DIGEST}"
    (fetch,) = pod({"image": {"reference": reference}}, Facts(model_revision="sha256:" + "0" * 64))["initContainers"]
    assert f"--image={reference}" in fetch["args"]


@pytest.mark.parametrize(("source", "mib"), [(hub(), 1024 + 2048), (IMAGE, 1024 + 2 * 2048)])
def test_a_download_may_take_its_size_of_the_nodes_disk_and_not_all(source: dict[str, Any], mib: int) -> None:
    assert volume_of(pod(source))["emptyDir"] == {"sizeLimit": "1Ti"}, "its size is not known"
    limited = volume_of(pod(source, Facts(checkpoint_bytes=2 << 30)))["emptyDir"]["sizeLimit"]
    assert limited == f"{mib // 1024}Gi"


def test_a_cache_is_one_volume_with_a_folder_for_each_revision() -> None:
    facts, cache = Facts(model_revision=COMMIT), {"size": "20Gi"}
    spec, folder = pod(hub(), facts, cache), served_folder(hub(), facts, cache)
    assert volume_of(spec)["persistentVolumeClaim"] == {"claimName": "demo-model-cache"}
    (fetch,) = spec["initContainers"]
    assert f"--into={folder}" in fetch["args"]
    mount = next(mount for mount in spec["containers"][0]["volumeMounts"] if mount["name"] == "model")
    assert folder == f"{mount['mountPath']}/org--name-0123456789ab"
    assert mount["readOnly"] is True
    assert served_folder(hub(), Facts(model_revision="f" * 40), cache) != folder
    assert served_folder(IMAGE, Facts(model_revision=DIGEST), cache) == "/models/image/model-abababababab"


def test_the_claim_of_a_cache_says_what_the_spec_says_in_the_servers_words() -> None:
    cache = {"size": "1024Gi", "storageClassName": "fast", "accessMode": "ReadWriteOnce"}
    claim = model_cache(deployment(model={"source": hub(), "cache": cache}))
    assert claim is not None
    assert claim["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "1Ti"}},
        "storageClassName": "fast",
    }
    assert model_cache(deployment()) is None
