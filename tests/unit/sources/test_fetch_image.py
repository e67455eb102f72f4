"""`fetch` from an image or artifact: a local stand-in for an OCI registry, over real sockets."""

from __future__ import annotations

import base64
import gzip
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from millstream_runtime.errors import FailureReason, InvalidConfigError, RuntimeFailure
from millstream_runtime.sources import layers
from millstream_runtime.sources.client import RetryPolicy
from millstream_runtime.sources.fetch import FetchOptions, FetchResult, fetch
from millstream_runtime.sources.folder import MARKER_NAME
from millstream_runtime.sources.image_reference import parse_reference
from millstream_runtime.sources.image_source import ImageSource
from tests.support.local_registry import OCI_INDEX, PASSWORD, USER, LocalRegistry, tar_of
from tests.support.local_web import Fault
from tests.support.model_files import WANTED, model_files, safetensors


class Pulling:
    """`pulling("tag")` from the local registry into `into`."""

    def __init__(self, registry: LocalRegistry, into: Path, policy: RetryPolicy, options: FetchOptions) -> None:
        self.registry, self.into, self.policy, self.options = registry, into, policy, options
        self.docker_config: Path | None = None

    def __call__(self, version: str = ":1") -> FetchResult:
        reference = f"{self.registry.host}/org/tiny{version}"
        configs = [self.docker_config] if self.docker_config is not None else []
        source = ImageSource(reference, docker_configs=configs, policy=self.policy)
        return fetch(source, self.into, lambda _: None, self.options)

    def failure(self, version: str = ":1") -> RuntimeFailure:
        with pytest.raises(RuntimeFailure) as caught:
            self(version)
        assert not (self.into / MARKER_NAME).exists()
        assert self.visible() == set()
        return caught.value

    def visible(self) -> set[str]:
        return {path.name for path in self.into.iterdir() if not path.name.startswith(".")}


@pytest.fixture
def pulling(registry: LocalRegistry, tmp_path: Path, policy: RetryPolicy, options: FetchOptions) -> Pulling:
    return Pulling(registry, tmp_path / "tiny", policy, options)


def needed() -> dict[str, bytes]:
    return {name: content for name, content in model_files().items() if name in WANTED}


def below_models(files: dict[str, bytes]) -> list[tuple[str, bytes]]:
    return [(f"models/{name}", content) for name, content in files.items()]


SYSTEM = [("etc/passwd", b"root:x:0:0"), ("bin/config.json", b"not this one")]


@pytest.mark.parametrize("compress", [False, True])
def test_an_image_gives_what_lies_in_models(pulling: Pulling, registry: LocalRegistry, compress: bool) -> None:
    link = tarfile.TarInfo("usr/lib64")
    link.type, link.linkname = tarfile.SYMTYPE, "/lib"
    digest = registry.image(
        "1", tar_of([*SYSTEM, link], compress=True), tar_of(below_models(model_files()), compress=compress)
    )
    result = pulling()
    assert pulling.visible() == WANTED
    assert all((pulling.into / name).read_bytes() == content for name, content in needed().items())
    assert result.marker.revision == digest
    assert result.marker.source == {"kind": "image", "reference": f"{registry.host}/org/tiny"}
    registry.requests.clear()
    assert pulling().kept
    assert pulling(f"@{digest}").kept
    assert not registry.requests


def test_an_artifact_gives_its_files(pulling: Pulling, registry: LocalRegistry) -> None:
    registry.artifact("1", {f"tiny/{name}": content for name, content in model_files().items()})
    pulling()
    assert pulling.visible() == WANTED
    assert not any(registry.gets(f"/{name}") for name in ("evil", "pickle"))


@pytest.mark.parametrize("kind", ["image", "artifact"])
def test_named_chat_templates_are_part_of_a_model(pulling: Pulling, registry: LocalRegistry, kind: str) -> None:
    template = "additional_chat_templates/default.jinja"
    files = {**needed(), template: b"{{ 1 }}", "other/default.jinja": b"{{ 2 }}"}
    if kind == "image":
        registry.image("1", tar_of(below_models(files)))
    else:
        registry.artifact("1", {f"tiny/{name}": content for name, content in files.items()})
    pulling()
    assert pulling.visible() == WANTED | {"additional_chat_templates"}
    assert [path.name for path in (pulling.into / "additional_chat_templates").iterdir()] == ["default.jinja"]
    assert (pulling.into / template).read_bytes() == b"{{ 1 }}"


def test_an_artifact_of_tar_and_raw_layers(pulling: Pulling, registry: LocalRegistry) -> None:
    """As CNCF ModelPack packs: configuration in a tar, weights raw."""
    weights = {name: content for name, content in needed().items() if name.endswith(".safetensors")}
    rest = [(f"./{name}", content) for name, content in needed().items() if name not in weights]
    packed = [registry.blob(tar_of(rest), "application/vnd.cncf.model.weight.config.v1.tar")]
    kind = "application/vnd.cncf.model.weight.v1.raw"
    packed += [registry.blob(content, kind, org__cncf__model__filepath=name) for name, content in weights.items()]
    registry.manifest("1", packed, "application/vnd.cncf.model.config.v1+json")
    pulling()
    assert pulling.visible() == WANTED


def test_a_model_one_folder_deeper_and_an_index_of_platforms(pulling: Pulling, registry: LocalRegistry) -> None:
    inner = registry.image("inner", tar_of([(f"./models/tiny/{name}", data) for name, data in needed().items()]))
    content = {
        "schemaVersion": 2,
        "manifests": [
            {"digest": "sha256:" + "0" * 64, "platform": {"architecture": "unknown", "os": "unknown"}},
            {"digest": inner, "platform": {"architecture": "s390x", "os": "linux"}},
        ],
    }
    outer = registry.put("1", OCI_INDEX, content)
    assert pulling().marker.revision == outer
    assert pulling.visible() == WANTED


def test_upper_layers_replace_and_delete(pulling: Pulling, registry: LocalRegistry) -> None:
    lower = {**needed(), "adapter_config.json": b"{}", "old/config.json": b"{}", "vocab.txt": b"a"}
    upper = [("models/.wh.adapter_config.json", b""), ("models/tokenizer.json", b'{"new": 1}'), ("models/.wh.old", b"")]
    registry.image("1", tar_of(below_models(lower)), tar_of(upper, compress=True))
    pulling()
    assert pulling.visible() == WANTED | {"vocab.txt"}
    assert (pulling.into / "tokenizer.json").read_bytes() == b'{"new": 1}'
    opaque = [("models/.wh..wh..opq", b""), *below_models({**needed(), "merges.txt": b"b"})]
    registry.image("2", tar_of(below_models(lower)), tar_of(opaque))
    pulling.into = pulling.into.with_name("other")
    pulling(":2")
    assert pulling.visible() == WANTED | {"merges.txt"}


def special(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = kind, link
    return entry


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (("models/../../../tmp/config.json", b"{}"), "leads out"),
        (("/models/config.json", b"{}"), "leads out"),
        (special("models/model.safetensors", tarfile.SYMTYPE, "/etc/passwd"), "link"),
        (special("models/config.json", tarfile.LNKTYPE, "etc/passwd"), "link"),
        (special("models/sub", tarfile.SYMTYPE, "/etc"), "link"),
        (special("models", tarfile.SYMTYPE, "/etc"), "link"),
        (special("models/config.json", tarfile.CHRTYPE), "device"),
        (special("models/config.json", tarfile.FIFOTYPE), "device"),
    ],
)
def test_an_archive_that_would_lead_out_is_refused(
    pulling: Pulling, registry: LocalRegistry, tmp_path: Path, entry: tuple[str, bytes] | tarfile.TarInfo, says: str
) -> None:
    registry.image("1", tar_of([entry, *below_models(needed())]))
    before = set(tmp_path.parent.iterdir())
    failure = pulling.failure()
    assert failure.reason is FailureReason.CHECKPOINT_INVALID
    assert says in failure.message
    assert set(tmp_path.parent.iterdir()) == before


def test_an_artifacts_file_name_that_leads_out_is_refused(pulling: Pulling, registry: LocalRegistry) -> None:
    registry.artifact("1", {**needed(), "../../evil.json": b"{}"})
    assert "leads out of its folder" in pulling.failure().message


def test_bombs_are_refused(pulling: Pulling, registry: LocalRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "EXPANSION_FLOOR_BYTES", 1 << 20)
    registry.image("1", tar_of([("models/model.safetensors", bytes(30 << 20))], compress=True))
    assert "unpacks to more than" in pulling.failure().message

    pax = tarfile.TarInfo("models/config.json")
    pax.pax_headers = {"comment": "x" * (2 << 20)}
    registry.image("2", tar_of([pax]))
    assert "has a tar header of" in pulling.failure(":2").message

    monkeypatch.setattr(layers, "MAX_MEMBERS", 10)
    registry.image("3", tar_of([(f"f{number}", b"") for number in range(20)]))
    assert "more than 10 entries" in pulling.failure(":3").message


def test_a_member_that_does_not_fit_the_disk(pulling: Pulling, registry: LocalRegistry) -> None:
    """The free space is the fake here: enough for the compressed layer, not for what is in it."""
    registry.image("1", tar_of(below_models({"model.safetensors": bytes(9 << 20)}), compress=True))
    pulling.options = replace(pulling.options, free_space=lambda _: 70 << 20)
    assert pulling.failure().reason is FailureReason.DISK_FULL


@pytest.mark.parametrize("damage", ["gzip", "not a tar"])
def test_a_damaged_archive(pulling: Pulling, registry: LocalRegistry, damage: str) -> None:
    whole = tar_of(below_models(needed()), compress=True)
    registry.image("1", whole[: len(whole) // 2] if damage == "gzip" else b"no tar at all" * 100)
    failure = pulling.failure()
    assert failure.reason is FailureReason.CHECKPOINT_INVALID
    assert "not a readable tar archive" in failure.message


def test_zstd_is_named(pulling: Pulling, registry: LocalRegistry) -> None:
    registry.image("1", b"\x28\xb5\x2f\xfd" + bytes(100))
    failure = pulling.failure()
    assert failure.reason is FailureReason.UNSUPPORTED_BY_RUNTIME
    assert "zstd" in failure.message


def test_a_layer_is_resumed_and_checked(pulling: Pulling, registry: LocalRegistry) -> None:
    registry.image("1", tar_of(below_models(needed())))
    registry.faults.append(Fault("/blobs/", times=3, cut_after_bytes=700_000))
    pulling()
    assert registry.sent("/blobs/") == len(tar_of(below_models(needed())))
    pulling.into = pulling.into.with_name("other")
    registry.faults.append(Fault("/blobs/", times=9, garble=True))
    assert pulling.failure().reason is FailureReason.DOWNLOAD_FAILED


def test_a_layer_that_was_unpacked_is_not_fetched_again(pulling: Pulling, registry: LocalRegistry) -> None:
    registry.image("1", tar_of(SYSTEM), tar_of(below_models(needed())))
    first, second = (layer["digest"] for layer in json.loads(registry.manifests["1"][1])["layers"])
    registry.faults.append(Fault(second, times=1, status=404))
    pulling.failure()
    pulling()
    assert (registry.gets(first), registry.gets(second)) == (1, 2)


def write_docker_config(path: Path, host: str, password: str = PASSWORD) -> Path:
    auth = base64.b64encode(f"{USER}:{password}".encode()).decode()
    path.write_text(json.dumps({"auths": {host: {"auth": auth}}}))
    return path


@pytest.mark.parametrize("wants", ["basic", "bearer"])
def test_a_login(pulling: Pulling, registry: LocalRegistry, tmp_path: Path, wants: str) -> None:
    registry.wants = wants
    registry.artifact("1", needed())
    failure = pulling.failure()
    assert failure.reason is FailureReason.DOWNLOAD_UNAUTHORIZED
    assert "no login was given" in failure.message
    pulling.docker_config = write_docker_config(tmp_path / "config.json", registry.host, "another password")
    failure = pulling.failure()
    assert failure.reason is FailureReason.DOWNLOAD_UNAUTHORIZED
    assert "was refused" in failure.message
    assert "another" not in failure.message
    write_docker_config(tmp_path / "config.json", f"https://{registry.host}/v2/")
    pulling()
    assert pulling.visible() == WANTED


def test_a_docker_config_that_is_none(pulling: Pulling, registry: LocalRegistry, tmp_path: Path) -> None:
    pulling.docker_config = tmp_path / "config.json"
    for content in ("no json", json.dumps({"auths": {registry.host: {"auth": "!"}}})):
        pulling.docker_config.write_text(content)
        with pytest.raises(InvalidConfigError, match="--docker-config"):
            pulling()


def test_what_is_not_there(pulling: Pulling, registry: LocalRegistry) -> None:
    assert "HTTP 404" in pulling.failure(":none").message
    registry.image("1", tar_of(SYSTEM))
    assert "has no config.json" in pulling.failure().message


def test_a_manifest_that_is_not_the_one_asked_for(pulling: Pulling, registry: LocalRegistry) -> None:
    digest = registry.artifact("1", needed())
    registry.manifests[digest] = (registry.manifests[digest][0], registry.manifests[digest][1] + b" ")
    failure = pulling.failure(f"@{digest}")
    assert failure.reason is FailureReason.DOWNLOAD_FAILED
    assert "with a manifest that is" in failure.message


@pytest.mark.parametrize(
    ("text", "host", "repository", "version"),
    [
        ("llama", "registry-1.docker.io", "library/llama", "latest"),
        ("org/llama:8b", "registry-1.docker.io", "org/llama", "8b"),
        ("index.docker.io/org/llama", "registry-1.docker.io", "org/llama", "latest"),
        ("ghcr.io/org/a/b:1", "ghcr.io", "org/a/b", "1"),
        ("registry:5000/llama", "registry:5000", "llama", "latest"),
        ("localhost/llama@sha256:" + "a" * 64, "localhost", "llama", "sha256:" + "a" * 64),
        ("[::1]:5000/x:y", "[::1]:5000", "x", "y"),
    ],
)
def test_references(text: str, host: str, repository: str, version: str) -> None:
    reference = parse_reference(text)
    assert (reference.api_host, reference.repository, reference.version) == (host, repository, version)


@pytest.mark.parametrize("text", ["", "A/B", "x:", "x@sha256:12", "http://x/y", "x/../y:1", "a b", "x.io/", "x:y:z"])
def test_what_is_no_reference(text: str) -> None:
    with pytest.raises(InvalidConfigError, match="--image is"):
        parse_reference(text)


def test_an_archive_cut_inside_a_file_is_noticed(pulling: Pulling, registry: LocalRegistry) -> None:
    whole = tar_of([("models/model.safetensors", safetensors({"a": ("F32", [100], 400)}) + bytes(4000))])
    registry.image("1", gzip.compress(whole[:2000]))
    failure = pulling.failure()
    assert failure.reason is FailureReason.CHECKPOINT_INVALID


def test_of_several_logins_the_one_for_the_registry_counts(
    registry: LocalRegistry, policy: RetryPolicy, tmp_path: Path
) -> None:
    """A pod may name several image pull Secrets."""
    registry.wants = "basic"
    registry.artifact("1", needed())
    configs = [
        write_docker_config(tmp_path / "other.json", "registry.example.com"),
        write_docker_config(tmp_path / "ours.json", registry.host),
    ]
    source = ImageSource(f"{registry.host}/org/tiny:1", docker_configs=configs, policy=policy)
    assert source.at(source.resolve().revision).resolve().files.keys() >= {"config.json"}
