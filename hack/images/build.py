"""Assemble an image from its RUN-free Dockerfile and its trees, and push only what the registry lacks.

    Dockerfile + inputs --hash--> tag --in the registry?--> yes: done
                                                       \\-> no: stage -> tar layers -> push -> manifest

`docker build` is not used because the CUDA build of torch is 4.5 GB: a daemon copies it four times (context, COPY,
commit, compress) and spends minutes compressing what travels over loopback. Here a layer is written once, as an
uncompressed tar, while it is hashed. `python -m hack.images stage runtime DIR` writes the build context with which
`docker build` makes the same image.

    tag = hash(Dockerfile, base digest, every tree's input hash)     same inputs, same tag: already built
    layer key = hash(tree's input hash, target)                      kept in the registry as millstream-layers:<key>

All state is in the registry, so it cannot be inconsistent, and clones share what one of them pushed.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hack.images.contexts import Stage, Tree, trees
from hack.images.dockerfile import Copy, Dockerfile, parse
from hack.images.errors import ImageError
from hack.images.layer import EPOCH_SECONDS, write_layer
from hack.images.registry import DOCKER_INDEX, OCI_CONFIG, OCI_INDEX, OCI_LAYER, OCI_MANIFEST, Descriptor, Registry

IMAGES = ("operator", "runtime")
LAYERS_REPOSITORY = "millstream-layers"
_CREATED = datetime.fromtimestamp(EPOCH_SECONDS, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
_GZIPPED_LAYER = f"{OCI_LAYER}+gzip"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Base:
    """The image below ours, as the registry holds it."""

    repository: str
    reference: str
    digest: str
    config: dict[str, Any]
    layers: tuple[Descriptor, ...]


@dataclass(frozen=True, slots=True)
class Built:
    """An image that the registry holds."""

    reference: str
    fresh: bool  # False when it was there already


def repository(image: str) -> str:
    """The image's name in a registry."""
    return f"millstream-{image}"


def read_dockerfile(image: str, checkout: Path, base: str) -> Dockerfile:
    """The image's Dockerfile, read with the base image as its argument BASE."""
    path = checkout / "hack" / "images" / image / "Dockerfile"
    return parse(path.read_text(), {"BASE": base}, name=f"hack/images/{image}/Dockerfile")


def context_of(image: str, dockerfile: Dockerfile, checkout: Path) -> dict[str, Tree]:
    """The trees of the image, checked against the Dockerfile: each is copied, and nothing else is."""
    stage = Stage(checkout, dockerfile.arguments["PYTHON_VERSION"], dockerfile.base)
    found = trees(image, stage)
    copied = {copy.source for copy in dockerfile.copies}
    if odd := copied ^ set(found):
        raise ImageError(
            f"hack/images/{image}/Dockerfile and hack/images/contexts.py disagree about {', '.join(sorted(odd))}."
        )
    return found


def tag_of(dockerfile: Dockerfile, context: Mapping[str, Tree], base_digest: str) -> str:
    """Sixteen hex digits of everything that the image is made from."""
    facts = {
        "base": base_digest,
        "layers": [layer_key(copy, context[copy.source]) for copy in dockerfile.copies],
        "config": _own_config(dockerfile),
        "machine": platform.machine(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def layer_key(copy: Copy, tree: Tree) -> str:
    """What a layer's bytes depend on: also its tag in `millstream-layers`."""
    return hashlib.sha256(f"{tree.input_hash}\0{copy.target}".encode()).hexdigest()[:32]


def build(image: str, *, checkout: Path, registry: Registry, base: str, say: Say) -> Built:
    """Make sure that the registry holds the image of this checkout; `base` is a reference into the same registry."""
    below = read_base(registry, base)
    dockerfile = read_dockerfile(image, checkout, base)
    require_python(below, dockerfile.arguments["PYTHON_VERSION"])
    context = context_of(image, dockerfile, checkout)
    tag = tag_of(dockerfile, context, below.digest)
    name = repository(image)
    reference = f"{registry.address}/{name}:{tag}"
    if registry.manifest(name, tag):
        return Built(reference, fresh=False)
    layers = []
    for copy in dockerfile.copies:
        layer = _layer(copy, context[copy.source], registry, say)
        if not registry.has_blob(name, layer.digest):
            registry.mount(name, layer.digest, LAYERS_REPOSITORY)
        layers.append(layer)
    for inherited in below.layers:
        if not registry.has_blob(name, inherited.digest):
            registry.mount(name, inherited.digest, below.repository)
    config = image_config(dockerfile, below, layers)
    manifest = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": registry.put_blob(name, _json(config), OCI_CONFIG).as_json(),
        "layers": [layer.as_json() for layer in (*below.layers, *layers)],
    }
    registry.put_manifest(name, tag, manifest)
    return Built(reference, fresh=True)


def read_base(registry: Registry, reference: str) -> Base:
    """The base image's manifest and configuration.

    Raises:
        ImageError: the registry has no such image, or none for this machine's architecture.
    """
    address, _, rest = reference.partition("/")
    name, tag = rest.split("@", 1) if "@" in rest else rest.rsplit(":", 1)
    if address != registry.address:
        raise ImageError(f"The base image {reference} is not in {registry.address}: push it there first.")
    manifest = registry.manifest(name, tag)
    if manifest and manifest.content.get("mediaType") in (OCI_INDEX, DOCKER_INDEX):
        manifest = registry.manifest(name, _of_this_machine(manifest.content, reference))
    if not manifest:
        raise ImageError(f"{registry.address} has no base image {name}:{tag}: run `make cluster-up`, which pushes it.")
    config = json.loads(registry.blob(name, manifest.content["config"]["digest"]))
    return Base(name, reference, manifest.digest, config, tuple(map(_inherited, manifest.content["layers"])))


def require_python(base: Base, version: str) -> None:
    """Refuse a base whose Python is known to be another one: its packages would not be found to import.

    The official Python images say their version in PYTHON_VERSION; a base that says nothing is believed.
    """
    env = dict(pair.split("=", 1) for pair in (base.config.get("config") or {}).get("Env") or [])
    found = env.get("PYTHON_VERSION", version)
    if found != version and not found.startswith(f"{version}."):
        raise ImageError(f"The base image {base.reference} has Python {found}; the locks are resolved for {version}.")


def image_config(dockerfile: Dockerfile, base: Base, layers: list[Descriptor]) -> dict[str, Any]:
    """The OCI configuration: the base's, with what the Dockerfile says laid over it."""
    inherited = base.config.get("config") or {}
    env = dict(pair.split("=", 1) for pair in inherited.get("Env") or [])
    own = _own_config(dockerfile)
    config = inherited | own
    config["Env"] = [f"{key}={value}" for key, value in (env | dockerfile.env).items()]
    config["Labels"] = (inherited.get("Labels") or {}) | dockerfile.labels
    config["Labels"] |= {
        "org.opencontainers.image.base.digest": base.digest,
        "org.opencontainers.image.base.name": base.reference,
    }
    for unwanted in ("Cmd", "Healthcheck", "Shell", "OnBuild"):  # readiness is the pod's business
        config.pop(unwanted, None)
    history = [{"created": _CREATED, "created_by": f"COPY {copy.source}/ {copy.target}/"} for copy in dockerfile.copies]
    return {
        "created": _CREATED,
        "architecture": base.config["architecture"],
        "os": base.config["os"],
        "config": config,
        # An uncompressed layer's digest is also its diff_id.
        "rootfs": {"type": "layers", "diff_ids": base.config["rootfs"]["diff_ids"] + [x.digest for x in layers]},
        "history": (base.config.get("history") or []) + history,
    }


def _own_config(dockerfile: Dockerfile) -> dict[str, Any]:
    own: dict[str, Any] = {
        "Env": [f"{key}={value}" for key, value in dockerfile.env.items()],
        "Labels": dockerfile.labels,
        "User": dockerfile.user,
        "WorkingDir": dockerfile.working_dir,
        "Entrypoint": dockerfile.entrypoint,
        "ExposedPorts": {port: {} for port in dockerfile.ports},
    }
    if dockerfile.stop_signal:
        own["StopSignal"] = dockerfile.stop_signal
    return own


def _layer(copy: Copy, tree: Tree, registry: Registry, say: Say) -> Descriptor:
    """The layer's descriptor; made and pushed when the registry has none of this key."""
    key = layer_key(copy, tree)
    if (known := registry.manifest(LAYERS_REPOSITORY, key)) is not None:
        return Descriptor.of(known.content["layers"][0])
    with tempfile.TemporaryDirectory(prefix="layer-", dir=staging_folder()) as scratch:
        entries = tree.stage(Path(scratch) / "tree", copy.target)
        with registry.upload(LAYERS_REPOSITORY) as upload:
            write_layer(entries, copy.target, upload)
    layer = Descriptor(OCI_LAYER, upload.digest, upload.size_bytes)
    config = registry.put_blob(LAYERS_REPOSITORY, b"{}", OCI_CONFIG)
    manifest = {"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": config.as_json(), "layers": [layer.as_json()]}
    registry.put_manifest(LAYERS_REPOSITORY, key, manifest)
    say(f"{copy.source}: {layer.size_bytes / 1e6:,.1f} MB, {len(entries):,} files")
    return layer


def staging_folder() -> Path:
    """Where layers are prepared: next to uv's cache, so that hard links work."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "millstream" / "images"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _inherited(layer: Mapping[str, Any]) -> Descriptor:
    """A base layer under its OCI name: Docker's media types say the same of the same bytes."""
    renamed = {
        "application/vnd.docker.image.rootfs.diff.tar.gzip": _GZIPPED_LAYER,
        "application/vnd.docker.image.rootfs.diff.tar": OCI_LAYER,
    }
    return Descriptor(renamed.get(layer["mediaType"], layer["mediaType"]), layer["digest"], layer["size"])


def _of_this_machine(index: Mapping[str, Any], reference: str) -> str:
    wanted = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine().lower(), platform.machine().lower())
    for manifest in index["manifests"]:
        if manifest.get("platform", {}).get("os") == "linux" and manifest["platform"].get("architecture") == wanted:
            return str(manifest["digest"])
    raise ImageError(f"The base image {reference} has no variant for linux/{wanted}.")


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
