"""Pod defaults that an administrator sets for every LLMDeployment, in the chart's values.

Keys of a spec override them. Like the default image, they reach a pod only when its spec next changes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, ValidationError

from millstream_operator.api.base import ApiModel, DNSSubdomain, LabelValue, QualifiedName
from millstream_operator.api.load import field_error
from millstream_operator.api.pod_template import Toleration


class PodDefaults(ApiModel):
    labels: dict[QualifiedName, LabelValue] = Field(default_factory=dict)
    annotations: dict[QualifiedName, Annotated[str, StringConstraints(max_length=4096)]] = Field(default_factory=dict)
    node_selector: dict[QualifiedName, LabelValue] = Field(default_factory=dict)
    tolerations: list[Toleration] = Field(default_factory=list)
    priority_class_name: DNSSubdomain | Literal[""] = ""


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
