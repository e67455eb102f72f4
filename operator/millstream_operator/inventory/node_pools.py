"""Node pools that an autoscaler may grow from zero, as the operator's settings declare them.

    [{"product": "H100-80GB", "gpusPerNode": 8, "maxNodes": 4, "labels": {}, "taints": []}]

A pool without a node is not in the API server, so its GPUs cannot be seen: the chart declares them.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints, TypeAdapter, ValidationError

from millstream_operator.api.base import ApiModel, LabelValue, QualifiedName
from millstream_operator.inventory.demands import Taint, read_taints

MAX_POOLS = 64


class PoolTaint(ApiModel):
    """A taint of the pool's nodes."""

    key: QualifiedName
    value: LabelValue = ""
    effect: Annotated[str, StringConstraints(pattern="^(NoSchedule|NoExecute|PreferNoSchedule)$")]


class NodePool(ApiModel):
    """`product`: a GPU of the catalogue, by name, alias or node label. `labels`: of its nodes, for nodeSelector."""

    product: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    gpus_per_node: Annotated[int, Field(ge=1, le=72)]
    max_nodes: Annotated[int, Field(ge=1, le=10_000)]
    labels: dict[QualifiedName, LabelValue] = Field(default_factory=dict)
    taints: list[PoolTaint] = Field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.product}:{self.gpus_per_node}"

    @property
    def repelling_taints(self) -> tuple[Taint, ...]:
        return read_taints([one.model_dump(by_alias=True) for one in self.taints])


_POOLS = TypeAdapter(Annotated[list[NodePool], Field(max_length=MAX_POOLS)])


def read_node_pools(text: str) -> tuple[NodePool, ...]:
    """The pools of a JSON list; none for an empty text.

    Raises:
        ValueError: one sentence that says where and what.
    """
    try:
        return tuple(_POOLS.validate_json(text.strip() or "[]", by_alias=True, by_name=False))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(step) for step in first["loc"])
        raise ValueError(
            f"{f'{where}: ' if where else ''}{first['msg']}; it must be a JSON list of node pools such as "
            '[{"product": "H100-80GB", "gpusPerNode": 8, "maxNodes": 4}].'
        ) from None
