"""GPUs whose nodes the pods' own nodeSelector and required node affinity could admit. Pure.

A node that is added can get any label but one: GPU feature discovery writes which GPU it has. So only what the spec
requires of `nvidia.com/gpu.product` decides.
"""

from __future__ import annotations

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.catalog.gpu import GpuPart
from millstream_operator.inventory.node_affinity import Terms, admit, read_terms
from millstream_operator.inventory.nodes import PRODUCT_LABEL


def admits_part(deployment: LLMDeployment, part: GpuPart) -> bool:
    """Whether the pods could run on a node with this GPU. One whose label is not known is not ruled out."""
    pod = deployment.spec.pod_template.spec if deployment.spec.pod_template else None
    if pod is None or not part.product_labels:
        return True
    selected = (pod.node_selector or {}).get(PRODUCT_LABEL)
    affinity = pod.affinity.model_dump(mode="json", by_alias=True, exclude_none=True) if pod.affinity else {}
    terms = _of_the_product(read_terms(affinity))
    return any(selected in (None, label) and admit(terms, {PRODUCT_LABEL: label}) for label in part.product_labels)


def _of_the_product(terms: Terms) -> Terms:
    """The expressions about the GPU alone: an alternative without any admits every node."""
    return frozenset(frozenset(one for one in term if one[0] == PRODUCT_LABEL) for term in terms)
