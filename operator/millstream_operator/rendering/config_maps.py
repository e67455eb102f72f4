"""The two halves of the runtime's configuration as ConfigMaps, and the volume that mounts them.

    NAME-<hash>   boot.json, immutable, one per configuration: a change is another name, hence a rollout
    NAME-live     live.json, one per LLMDeployment: the kubelet updates running pods within about a minute

Both are one projected volume. A pod that starts while NAME-live is missing uses the runtime's defaults: a deleted
child must not keep a model from serving.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.rendering.names import child
from millstream_operator.rendering.runtime_config import live_config
from millstream_runtime.config_files import BOOT_FILE, LIVE_FILE, dump, dump_fields

CONFIG_VOLUME = "config"
CONFIG_FOLDER = "/etc/millstream"
LIVE_PATH = f"live/{LIVE_FILE}"
CONFIG_ARGS = [f"--config={CONFIG_FOLDER}/{BOOT_FILE}", f"--live-config={CONFIG_FOLDER}/{LIVE_PATH}"]
HASH_LENGTH = 10  # short enough for a name; only an owner's few configurations must differ


def boot_map_name(owner_name: str, config_hash: str) -> str:
    return f"{owner_name}-{config_hash[:HASH_LENGTH]}"


def live_map_name(owner_name: str) -> str:
    return f"{owner_name}-live"


def boot_config_map(owner: LLMDeployment, boot: Mapping[str, Any], config_hash: str) -> dict[str, Any]:
    """`boot`: the fields of a BootConfig, as they were pinned."""
    rendered = child(owner, "v1", "ConfigMap", name=boot_map_name(owner.name, config_hash))
    return rendered | {"immutable": True, "data": {BOOT_FILE: dump_fields(dict(boot))}}


def live_config_map(owner: LLMDeployment, probe_key_digests: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the ConfigMap of the live configuration. It follows the spec, whichever revision runs."""
    rendered = child(owner, "v1", "ConfigMap", name=live_map_name(owner.name))
    return rendered | {"data": {LIVE_FILE: dump(live_config(owner.spec, probe_key_digests))}}


def config_volume(owner_name: str, config_hash: str) -> dict[str, Any]:
    """Return the volume of a pod that runs the configuration of this hash."""
    boot = {"name": boot_map_name(owner_name, config_hash), "items": [{"key": BOOT_FILE, "path": BOOT_FILE}]}
    live = {"name": live_map_name(owner_name), "items": [{"key": LIVE_FILE, "path": LIVE_PATH}], "optional": True}
    return {"name": CONFIG_VOLUME, "projected": {"sources": [{"configMap": boot}, {"configMap": live}]}}


def config_mount() -> dict[str, Any]:
    return {"name": CONFIG_VOLUME, "mountPath": CONFIG_FOLDER, "readOnly": True}


def mounted_maps(pods: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the names of the ConfigMaps that pods mount this way."""
    volumes = [volume for pod in pods for volume in pod["spec"].get("volumes") or ()]
    sources = [source for volume in volumes for source in (volume.get("projected") or {}).get("sources") or ()]
    return {source["configMap"]["name"] for source in sources if "configMap" in source}
