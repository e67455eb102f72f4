"""A model of the checkout as an OCI artifact in the local registry."""

from __future__ import annotations

from pathlib import Path

from hack.cluster.registry import address
from hack.images.registry import OCI_MANIFEST, Registry

MODELS = Path(__file__).resolve().parent.parent / "models"
TITLE = "org.opencontainers.image.title"


def push_model(folder: str | Path, repository: str, tag: str) -> str:
    """Push a folder, or one of `models/` by its name, each file a layer; return the manifest's digest."""
    registry = Registry(address())
    config = registry.put_blob(repository, b"{}", "application/vnd.oci.empty.v1+json")
    layers = []
    for path in sorted((MODELS / folder).iterdir()):
        blob = registry.put_blob(repository, path.read_bytes(), "application/octet-stream")
        layers.append(blob.as_json() | {"annotations": {TITLE: path.name}})
    content = {"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": config.as_json(), "layers": layers}
    return registry.put_manifest(repository, tag, content)
