"""Pushing against a small registry that checks what a real one checks: hashes, and a manifest's blobs."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from hack.images.build import Base, build, image_config, read_base, require_python
from hack.images.contexts import CONTRACT_FILES
from hack.images.dockerfile import parse
from hack.images.errors import ImageError
from hack.images.registry import OCI_CONFIG, OCI_LAYER, OCI_MANIFEST, Descriptor, Registry

ROOT = Path(__file__).resolve().parents[3]


class SmallRegistry(ThreadingHTTPServer):
    """Blobs and manifests in memory, by repository."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.blobs: dict[tuple[str, str], bytes] = {}
        self.manifests: dict[tuple[str, str], tuple[str, bytes]] = {}
        self.pending: dict[str, bytes] = {}
        self.wants_login = False


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: SmallRegistry

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def do_GET(self) -> None:
        self.read()

    def do_HEAD(self) -> None:
        self.read()

    def read(self) -> None:
        match = re.fullmatch(r"/v2/(.+)/(manifests|blobs)/(.+)", self.path)
        assert match
        key = (match[1], match[3])
        if match[2] == "blobs":
            found = self.server.blobs.get(key)
            self.answer(200, found) if found is not None else self.answer(404)
        elif key in self.server.manifests:
            kind, content = self.server.manifests[key]
            self.answer(200, content, Content_Type=kind)
        else:
            self.answer(404)

    def do_POST(self) -> None:
        self.body()
        if self.server.wants_login:
            return self.answer(401)
        parts = urlsplit(self.path)
        repository = parts.path.removeprefix("/v2/").removesuffix("/blobs/uploads/")
        query = parse_qs(parts.query)
        if "mount" in query:
            blob = self.server.blobs.get((query["from"][0], query["mount"][0]))
            if blob is not None:
                self.server.blobs[repository, query["mount"][0]] = blob
                return self.answer(201)
        return self.answer(202, Location=f"/v2/{repository}/blobs/uploads/{len(self.server.pending)}?state=s")

    def do_PATCH(self) -> None:
        self.server.pending[urlsplit(self.path).path] = self.body()
        self.answer(202, Location=self.path)

    def do_PUT(self) -> None:
        body, parts = self.body(), urlsplit(self.path)
        if match := re.fullmatch(r"/v2/(.+)/manifests/(.+)", parts.path):
            content = json.loads(body)
            named = [content["config"], *content["layers"]]
            if missing := [blob for blob in named if (match[1], blob["digest"]) not in self.server.blobs]:
                return self.answer(400, json.dumps(missing).encode())
            self.server.manifests[match[1], match[2]] = (self.headers["Content-Type"], body)
            return self.answer(201)
        digest = parse_qs(parts.query)["digest"][0]
        data = self.server.pending.pop(parts.path)
        if digest != f"sha256:{hashlib.sha256(data).hexdigest()}":
            return self.answer(400, b"digest invalid")
        self.server.blobs[parts.path.removeprefix("/v2/").split("/blobs/")[0], digest] = data
        return self.answer(201)


@pytest.fixture
def server() -> Iterator[SmallRegistry]:
    server = SmallRegistry()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def registry(server: SmallRegistry) -> Registry:
    return Registry(f"127.0.0.1:{server.server_port}")


def push_base(registry: Registry) -> str:
    layer = registry.put_blob("base", b"a layer", f"{OCI_LAYER}+gzip")
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": ["PATH=/old", "LANG=C.UTF-8"], "Cmd": ["python3"], "Labels": {"from": "base"}},
        "rootfs": {"type": "layers", "diff_ids": ["sha256:unpacked"]},
        "history": [{"created_by": "base"}],
    }
    described = registry.put_blob("base", json.dumps(config).encode(), OCI_CONFIG)
    manifest = {"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": described.as_json()}
    registry.put_manifest("base", "1", manifest | {"layers": [layer.as_json()]})
    return f"{registry.address}/base:1"


def small_checkout(folder: Path) -> Path:
    """A checkout whose operator image has our own code and the file by which Python finds it: nothing to install."""
    (folder / "hack" / "images" / "operator").mkdir(parents=True)
    lines = [
        "ARG BASE",
        f"ARG PYTHON_VERSION={sys.version_info.major}.{sys.version_info.minor}",
        "FROM ${BASE}",
        "COPY interpreter/ /lib/python${PYTHON_VERSION}/site-packages/",
        "COPY app/ /app/",
        "ENV PATH=/new",
        "USER 65532:65532",
        'ENTRYPOINT ["python3", "-m", "millstream_operator"]',
    ]
    (folder / "hack" / "images" / "operator" / "Dockerfile").write_text("\n".join(lines))
    (folder / "hack" / "images" / "interpreter").mkdir()
    (folder / "hack" / "images" / "interpreter" / "millstream.pth").write_text("import sys\n")
    (folder / "requirements").mkdir()
    (folder / "requirements" / "operator.txt").write_text("# nothing\n")
    for name in (
        "operator/millstream_operator/__init__.py",
        *(f"runtime/millstream_runtime/{n}" for n in CONTRACT_FILES),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("VALUE = 1\n")
    return folder


def test_an_image_is_pushed_once_and_an_edit_pushes_one_layer(
    tmp_path: Path, server: SmallRegistry, registry: Registry
) -> None:
    checkout, base, said = small_checkout(tmp_path), push_base(registry), list[str]()
    first = build("operator", checkout=checkout, registry=registry, base=base, say=said.append)
    assert first.fresh
    assert len(said) == 2
    repeated = build("operator", checkout=checkout, registry=registry, base=base, say=said.append)
    assert (repeated.fresh, repeated.reference) == (False, first.reference)
    assert len(said) == 2
    (checkout / "operator" / "millstream_operator" / "__init__.py").write_text("VALUE = 2\n")
    edited = build("operator", checkout=checkout, registry=registry, base=base, say=said.append)
    assert edited.fresh
    assert edited.reference != first.reference
    assert len(said) == 3

    name, _, tag = edited.reference.partition("/")[2].partition(":")
    _, content = server.manifests[name, tag]
    manifest = json.loads(content)
    config = json.loads(server.blobs[name, manifest["config"]["digest"]])
    assert config["rootfs"]["diff_ids"] == ["sha256:unpacked", *(layer["digest"] for layer in manifest["layers"][1:])]
    assert config["config"]["Env"] == ["PATH=/new", "LANG=C.UTF-8"]
    assert "Cmd" not in config["config"], "the base's command must not become our entry point's argument"
    assert config["config"]["User"] == "65532:65532"


def test_a_base_of_another_registry_is_refused(registry: Registry) -> None:
    with pytest.raises(ImageError, match="is not in"):
        read_base(registry, "elsewhere/base:1")


def test_a_missing_base_says_how_to_get_one(registry: Registry) -> None:
    with pytest.raises(ImageError, match="make cluster-up"):
        read_base(registry, f"{registry.address}/base:none")


def test_a_registry_that_wants_a_login_is_left_to_docker(server: SmallRegistry, registry: Registry) -> None:
    server.wants_login = True
    with pytest.raises(ImageError, match="images stage"):
        registry.put_blob("x", b"data", OCI_LAYER)


def test_a_closed_port_is_one_sentence() -> None:
    with pytest.raises(ImageError, match=r"127\.0\.0\.1:9 does not answer"):
        Registry("127.0.0.1:9").manifest("x", "y")


def test_a_base_with_another_python_is_refused() -> None:
    def base(*env: str) -> Base:
        return Base("base", "registry/base:1", "sha256:2", {"config": {"Env": list(env)}}, ())

    for fits in (base("PYTHON_VERSION=3.11.9"), base("PATH=/bin")):
        require_python(fits, "3.11")
    with pytest.raises(ImageError, match=r"has Python 3\.12\.1; the locks are resolved for 3\.11"):
        require_python(base("PYTHON_VERSION=3.12.1"), "3.11")


def test_labels_name_the_base() -> None:
    recipe = parse(
        'ARG BASE\nFROM $BASE\nLABEL mine=1\nENTRYPOINT ["x"]\n', {"BASE": "registry/base:1"}, name="Dockerfile"
    )
    config = {"architecture": "amd64", "os": "linux", "rootfs": {"diff_ids": []}, "config": {"Labels": {"from": "b"}}}
    base = Base("base", "registry/base:1", "sha256:2", config, (Descriptor(OCI_LAYER, "sha256:3", 1),))
    labels = image_config(recipe, base, [])["config"]["Labels"]
    assert labels["from"] == "b"
    assert labels["mine"] == "1"
    assert labels["org.opencontainers.image.base.digest"] == "sha256:2"
