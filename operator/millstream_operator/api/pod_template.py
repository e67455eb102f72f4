"""`spec.podTemplate`: the closed, typed part of a PodTemplateSpec that a user may change.

Every field stands at PodTemplateSpec's own path, so what is known of Deployments applies here. What could break
the restricted Pod Security profile, the probes or the drain (security contexts, volumes, commands, more
containers) is left out on purpose.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, GetCoreSchemaHandler, StringConstraints
from pydantic_core import core_schema

from millstream_operator.api.affinity import Affinity
from millstream_operator.api.base import ApiModel, DNSSubdomain, LabelValue, QualifiedName, once_per
from millstream_operator.api.validation.accepted_variables import ACCEPTED_IN_WORDS

QUANTITY_PATTERN = r"^[0-9]{1,15}(\.[0-9]{1,9})?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$"


class _IntOrString:
    """Kubernetes' int-or-string: `cpu: 2` and `cpu: "2"` mean the same, a YAML float is refused. Kept as a string."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        text = core_schema.str_schema(pattern=QUANTITY_PATTERN, max_length=32)
        number = core_schema.chain_schema(
            [core_schema.int_schema(strict=True, ge=0), core_schema.no_info_plain_validator_function(str), text]
        )
        return core_schema.tagged_union_schema(
            {"number": number, "text": text},
            discriminator=lambda value: "number" if isinstance(value, int) else "text",
            metadata={"pydantic_js_functions": [lambda _schema, _handler: dict(QUANTITY_SCHEMA)]},
        )


QUANTITY_SCHEMA: dict[str, Any] = {
    "anyOf": [{"type": "integer"}, {"type": "string"}],
    "x-kubernetes-int-or-string": True,
    "pattern": QUANTITY_PATTERN,
    "maxLength": 32,
    "minimum": 0,  # of integers, as the pattern of strings
    "maximum": 10**15 - 1,
}
Quantity = Annotated[str, _IntOrString]


class TolerationOperator(StrEnum):
    EXISTS = "Exists"
    EQUAL = "Equal"


class TaintEffect(StrEnum):
    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


class Toleration(ApiModel):
    """A taint that the pods may be scheduled onto."""

    key: QualifiedName | None = Field(None, description="Taint key. Absent, with operator Exists: every taint.")
    operator: TolerationOperator | None = Field(
        None, description="Exists (the key alone matters) or Equal (the value too). Default: Equal."
    )
    value: LabelValue | None = Field(None, description="Taint value, for operator Equal.")
    effect: TaintEffect | None = Field(None, description="Taint effect. Absent: all effects.")
    toleration_seconds: int | None = Field(
        None, ge=0, le=86400, description="Seconds that a NoExecute taint is tolerated. Absent: for ever."
    )


class KeyRef(ApiModel):
    """One key of a Secret or ConfigMap in the LLMDeployment's own namespace."""

    name: DNSSubdomain = Field(description="Name of the Secret or ConfigMap.")
    key: Annotated[str, StringConstraints(pattern=r"^[-._a-zA-Z0-9]+$", min_length=1, max_length=253)] = Field(
        description="Key in that Secret or ConfigMap."
    )
    optional: bool | None = Field(None, description="Start the pod even when it is missing. Default: false.")


class EnvVarSource(ApiModel):
    """Where the value of an environment variable comes from: exactly one of them."""

    secret_key_ref: KeyRef | None = Field(None, description="A key of a Secret.")
    config_map_key_ref: KeyRef | None = Field(None, description="A key of a ConfigMap.")


class EnvVar(ApiModel):
    """One environment variable of the runtime container. MILLSTREAM_* are the operator's, but for MILLSTREAM_LOG_*."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", min_length=1, max_length=256)] = Field(
        description="Name of the variable."
    )
    value: Annotated[str, StringConstraints(max_length=4096)] | None = Field(
        None, description="Its value, in plain text. Secrets belong in valueFrom.secretKeyRef."
    )
    value_from: EnvVarSource | None = Field(None, description="Take the value from a Secret or a ConfigMap instead.")


class ResourceList(ApiModel):
    """Amounts of compute. The accelerator's own resource (nvidia.com/gpu) is the planner's to set."""

    cpu: Quantity | None = Field(None, description="CPU cores, for example 2 or 500m.")
    memory: Quantity | None = Field(None, description="Memory in bytes, for example 4Gi.")
    ephemeral_storage: Quantity | None = Field(
        None, alias="ephemeral-storage", description="Local disk in bytes for logs and /tmp, for example 2Gi."
    )


class ResourceRequirements(ApiModel):
    """Resources of a container. A limit replaces the operator's request and limit; a request raises its limit."""

    requests: ResourceList | None = Field(None, description="What the scheduler sets aside for each pod.")
    limits: ResourceList | None = Field(None, description="What each pod may use at most.")


class ContainerName(StrEnum):
    RUNTIME = "runtime"


class InitContainerName(StrEnum):
    FETCH_MODEL = "fetch-model"


class InitContainer(ApiModel):
    """Changes to one init container of the pod."""

    name: InitContainerName = Field(description="Which init container: fetch-model, where the model is downloaded.")
    resources: ResourceRequirements | None = Field(
        None,
        description="CPU, memory and disk; the Job that inspects the model has the same. Default: requests of 100m "
        "CPU, 128Mi and 256Mi of disk, limits of 4 CPU, 512Mi and 2304Mi of disk.",
    )


class Container(ApiModel):
    """Changes to one container of the pod."""

    name: ContainerName = Field(description="Which container: runtime is the one there is.")
    env: Annotated[list[EnvVar], Field(max_length=64), once_per("name")] | None = Field(
        None,
        description="Environment variables added to the container. An image of your own (runtime.image) takes any. The "
        f"default image takes those that do not decide what code is loaded: {ACCEPTED_IN_WORDS}, and what the chart's "
        "runtime.allowedEnv adds.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    resources: ResourceRequirements | None = Field(
        None,
        description="CPU, memory and disk. Default on GPUs: by their number and the checkpoint's size. Default on CPU: "
        "requests of 250m CPU and 1Gi or what the weights take, limits of 16 CPU and 4Gi.",
    )


class LocalObjectReference(ApiModel):
    """A Secret of the namespace, by name."""

    name: DNSSubdomain = Field(description="Name of the Secret, of type kubernetes.io/dockerconfigjson.")


class PodSpec(ApiModel):
    """Scheduling and registry access of the pods."""

    node_selector: Annotated[dict[QualifiedName, LabelValue], Field(max_length=32)] | None = Field(
        None, description="Labels that a node must have. Added to the chart's own defaults."
    )
    tolerations: Annotated[list[Toleration], Field(max_length=32)] | None = Field(
        None,
        description="Taints that the pods tolerate. Added to the chart's own defaults.",
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
    )
    affinity: Affinity | None = Field(
        None,
        description="Nodes that the pods must or should run on, and pods that they run near to or away from. Added to "
        "what the operator itself asks for (the planned GPU). Default: none.",
    )
    priority_class_name: DNSSubdomain | None = Field(None, description="PriorityClass of the pods. Default: none.")
    runtime_class_name: DNSSubdomain | None = Field(
        None,
        description="RuntimeClass of the pods that serve, for example nvidia. The Job that inspects the model needs no "
        "GPU and has none. Default: the node's own.",
    )
    image_pull_secrets: Annotated[list[LocalObjectReference], Field(max_length=16), once_per("name")] | None = Field(
        None,
        description="Secrets to pull the runtime image with.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    init_containers: Annotated[list[InitContainer], Field(max_length=1)] | None = Field(
        None,
        description="Changes to the init container named fetch-model.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    containers: Annotated[list[Container], Field(max_length=1)] | None = Field(
        None,
        description="Changes to the container named runtime.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )


class PodMetadata(ApiModel):
    """Labels and annotations of the pods."""

    labels: Annotated[dict[QualifiedName, LabelValue], Field(max_length=32)] | None = Field(
        None, description="Labels added to the pods. Keys of millstream.dev/ and app.kubernetes.io/ are the operator's."
    )
    annotations: (
        Annotated[dict[QualifiedName, Annotated[str, StringConstraints(max_length=4096)]], Field(max_length=32)] | None
    ) = Field(None, description="Annotations added to the pods. Keys of millstream.dev/ are the operator's.")


class PodTemplate(ApiModel):
    """Changes to the pods, at PodTemplateSpec's own paths."""

    metadata: PodMetadata | None = Field(None, description="Labels and annotations of the pods.")
    spec: PodSpec | None = Field(None, description="Scheduling, registry access and the runtime container.")
