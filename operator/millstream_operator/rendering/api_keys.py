"""The Secret with the API keys, as a file in the pod: /var/run/secrets/millstream/api-keys/<secret>/<key>.

The operator has no right to read it. It is optional for the kubelet: a missing Secret would keep the pod in
ContainerCreating without a message, while the runtime ends with the reason APIKeysInvalid and names Secret and key. The
kubelet swaps the file when the Secret changes, and the runtime reads it again.
"""

from __future__ import annotations

from typing import Any

from millstream_operator.api.model import ObjectKey
from millstream_operator.rendering.source_access import CREDENTIAL_MODE
from millstream_runtime.config_files import API_KEYS_FOLDER

VOLUME = "api-keys"


def api_keys_path(keys: ObjectKey | None) -> str | None:
    """Return the path of the file in the pod."""
    return f"{API_KEYS_FOLDER}/{_named(keys)}" if keys is not None else None


def api_keys_volumes(keys: ObjectKey | None) -> list[dict[str, Any]]:
    if keys is None:
        return []
    secret = {
        "secretName": keys.name,
        "items": [{"key": keys.key, "path": _named(keys)}],
        "defaultMode": CREDENTIAL_MODE,
        "optional": True,
    }
    return [{"name": VOLUME, "secret": secret}]


def api_keys_mounts(keys: ObjectKey | None) -> list[dict[str, Any]]:
    return [{"name": VOLUME, "mountPath": API_KEYS_FOLDER, "readOnly": True}] if keys is not None else []


def _named(keys: ObjectKey) -> str:
    return f"{keys.name}/{keys.key}"
