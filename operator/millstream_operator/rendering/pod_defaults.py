"""Pod defaults that an administrator sets for every LLMDeployment, in the chart's values.

Keys of a spec override them. Like the default image, they reach a pod only when its spec next changes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError, field_validator

from millstream_operator.api.base import ApiModel, DNSSubdomain, LabelValue, QualifiedName
from millstream_operator.api.pod_template import Toleration
from millstream_operator.api.validation.field_errors import field_error
from millstream_runtime.errors import InvalidConfigError
from millstream_runtime.sources.allowed_hubs import VARIABLE, read_allowed_hubs


class PodDefaults(ApiModel):
    labels: dict[QualifiedName, LabelValue] = Field(default_factory=dict)
    annotations: dict[QualifiedName, Annotated[str, StringConstraints(max_length=4096)]] = Field(default_factory=dict)
    node_selector: dict[QualifiedName, LabelValue] = Field(default_factory=dict)
    tolerations: list[Toleration] = Field(default_factory=list)
    priority_class_name: DNSSubdomain | Literal[""] = ""
    image_pull_secrets: Annotated[list[DNSSubdomain], Field(max_length=16)] = Field(default_factory=list)
    allowed_hubs: Annotated[list[Annotated[str, StringConstraints(max_length=253)]], Field(max_length=32)] = Field(
        default_factory=list
    )  # names, addresses and ranges that downloads reach although they are closed

    @field_validator("allowed_hubs")
    @classmethod
    def _are_hosts_or_ranges(cls, entries: list[str]) -> list[str]:
        """As the pods will read them: here one mistake would stop all downloads."""
        try:
            read_allowed_hubs({VARIABLE: ",".join(entries)})
        except InvalidConfigError as error:
            raise ValueError(error.message.removesuffix(".")) from None
        return entries

    def pull_secrets(self, own: Iterable[str]) -> list[dict[str, str]]:
        """Return `imagePullSecrets` of a pod: these, then those of its spec, each once."""
        return [{"name": name} for name in dict.fromkeys([*self.image_pull_secrets, *own])]

    def of_download(self, container: Mapping[str, Any]) -> dict[str, Any]:
        """Return a container that downloads with the variable of `allowed_hubs`, where there are any."""
        if not self.allowed_hubs:
            return {**container}
        variable = {"name": VARIABLE, "value": ",".join(self.allowed_hubs)}
        return {**container, "env": [*container.get("env", ()), variable]}


def load_pod_defaults(path: str | Path | None) -> PodDefaults:
    """Read the JSON file that the chart mounts; without a path, no defaults.

    Raises:
        ValueError: one sentence that names the file and what is wrong in it.
    """
    if not path:
        return PodDefaults()
    try:
        text = Path(path).read_text(encoding="utf-8") or json.dumps({})
        return PodDefaults.model_validate_json(text, by_alias=True, by_name=False)
    except OSError as error:
        raise ValueError(f"MILLSTREAM_POD_DEFAULTS: {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"MILLSTREAM_POD_DEFAULTS: {path}: not UTF-8 text ({error.reason}).") from None
    except ValidationError as error:
        raise ValueError(f"MILLSTREAM_POD_DEFAULTS: {path}: {field_error(error).sentence()}") from None
