"""`spec.podTemplate.spec.affinity`: a PodSpec's affinity at its own paths, as far as replicas of one model need it.

Left out on purpose: `matchFields`, `matchLabelKeys` and `mismatchLabelKeys`. What the schema cannot say is in
`api/validation/affinity_rules.py`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, StringConstraints

from millstream_operator.api.base import ApiModel, LabelValue, QualifiedName

ATOMIC: dict[str, Any] = {"x-kubernetes-list-type": "atomic"}
TERMS = EXPRESSIONS = Field(min_length=1, max_length=8, json_schema_extra=ATOMIC)
VALUES = NAMESPACES = Field(min_length=1, max_length=16, json_schema_extra=ATOMIC)
LABELS = Field(min_length=1, max_length=8)
Values = Annotated[list[LabelValue], VALUES]
NAMESPACE_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
Namespace = Annotated[str, StringConstraints(pattern=NAMESPACE_PATTERN, min_length=1, max_length=63)]
Weight = Annotated[int, Field(ge=1, le=100)]


class NodeSelectorOperator(StrEnum):
    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"
    GT = "Gt"
    LT = "Lt"


class LabelSelectorOperator(StrEnum):
    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


class NodeSelectorRequirement(ApiModel):
    """What one label of a node must be."""

    key: QualifiedName = Field(description="Label of the node.")
    operator: NodeSelectorOperator = Field(
        description="In or NotIn (values), Exists or DoesNotExist (the key alone), Gt or Lt (one whole number)."
    )
    values: Values | None = Field(
        None, description="At least one for In and NotIn, one whole number for Gt and Lt, else none."
    )


class NodeSelectorTerm(ApiModel):
    """Nodes by their labels: all expressions must hold."""

    match_expressions: Annotated[list[NodeSelectorRequirement], EXPRESSIONS] = Field(
        description="All of them must hold."
    )


class NodeSelector(ApiModel):
    """Nodes by their labels: one of the terms must hold."""

    node_selector_terms: Annotated[list[NodeSelectorTerm], TERMS] = Field(
        description="One of them must hold. The planned GPU's product is added to each."
    )


class PreferredSchedulingTerm(ApiModel):
    """Nodes that are preferred."""

    weight: Weight = Field(description="How much it counts, 1 to 100.")
    preference: NodeSelectorTerm = Field(description="The nodes, by their labels.")


class NodeAffinity(ApiModel):
    """On which nodes the pods run."""

    required_during_scheduling_ignored_during_execution: NodeSelector | None = Field(
        None,
        description="Nodes that the pods must run on. The planner counts GPUs on these nodes alone, and the Job that "
        "inspects the model runs on them, too.",
    )
    preferred_during_scheduling_ignored_during_execution: Annotated[list[PreferredSchedulingTerm], TERMS] | None = (
        Field(None, description="Nodes that are preferred where several have room. No plan is made by it.")
    )


class PodSelectorRequirement(ApiModel):
    """What one label must be."""

    key: QualifiedName = Field(description="Label.")
    operator: LabelSelectorOperator = Field(description="In or NotIn (values), Exists or DoesNotExist (the key alone).")
    values: Values | None = Field(None, description="At least one for In and NotIn, else none.")


class AffinitySelector(ApiModel):
    """Pods or namespaces by their labels. Without any: all."""

    match_labels: Annotated[dict[QualifiedName, LabelValue], LABELS] | None = Field(
        None, description="Labels that must be there."
    )
    match_expressions: Annotated[list[PodSelectorRequirement], EXPRESSIONS] | None = Field(
        None, description="All of them must hold."
    )


class PodAffinityTerm(ApiModel):
    """Pods, and how near to them."""

    label_selector: AffinitySelector | None = Field(None, description="Which pods. Absent: none.")
    namespaces: Annotated[list[Namespace], NAMESPACES] | None = Field(
        None, description="In which namespaces. Default: the LLMDeployment's own, if namespaceSelector is absent."
    )
    namespace_selector: AffinitySelector | None = Field(
        None, description="Namespaces by their labels, besides those of namespaces."
    )
    topology_key: QualifiedName = Field(
        description="Node label: nodes with one value of it count as one place, for example kubernetes.io/hostname."
    )


class WeightedPodAffinityTerm(ApiModel):
    """Pods that are preferred near, or far."""

    weight: Weight = Field(description="How much it counts, 1 to 100.")
    pod_affinity_term: PodAffinityTerm = Field(description="Which pods, and how near to them.")


Required = Annotated[list[PodAffinityTerm], TERMS]
Preferred = Annotated[list[WeightedPodAffinityTerm], TERMS]


class PodAffinity(ApiModel):
    """Near which pods, or away from which pods, they run. The planner does not look at other pods' places."""

    required_during_scheduling_ignored_during_execution: Required | None = Field(
        None, description="All of them must hold, or the pod waits."
    )
    preferred_during_scheduling_ignored_during_execution: Preferred | None = Field(
        None, description="Preferred where several nodes have room."
    )


class Affinity(ApiModel):
    """Which nodes the pods run on, by labels of nodes and by other pods."""

    node_affinity: NodeAffinity | None = Field(None, description="By labels of nodes.")
    pod_affinity: PodAffinity | None = Field(None, description="Near these pods.")
    pod_anti_affinity: PodAffinity | None = Field(None, description="Away from these pods.")
