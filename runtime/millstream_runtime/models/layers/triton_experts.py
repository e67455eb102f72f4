"""A mixture of experts by Triton kernels that read no count back; see `millstream_kernels.experts`.

Importing this imports triton: only an engine that chose the kernels does (`execution.kernel_choice`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from millstream_kernels.elementwise.rms_norm import DTYPES
from millstream_kernels.experts.combine import combine
from millstream_kernels.experts.placement import place, tile_rows
from millstream_kernels.experts.product import UNIT, expert_linear
from millstream_kernels.experts.routing import RoutingRule, route
from millstream_runtime.models.layers.triton_linear import triton_dense_linear
from millstream_runtime.models.linear.linear import DenseExperts, ExpertLinears
from millstream_runtime.models.loading.layer_kernels import RouterSpec


@dataclass(frozen=True, slots=True)
class TritonExperts:
    """See `AddExperts`."""

    router: RouterSpec
    logits: Callable[[Tensor], Tensor]  # of the experts: `[T, hidden]` to `[T, experts]`
    rule: RoutingRule
    gate_up: Tensor  # [experts, hidden, 2 * inner]
    down: Tensor  # [experts, inner, hidden]

    def __call__(self, residual: Tensor, x: Tensor) -> None:
        routing = route(self.logits(x.to(self.router.gate.dtype)), self.rule, self.router.bias)
        num_experts = len(self.gate_up)
        placement = place(routing.experts, num_experts, tile_rows(routing.experts.numel(), num_experts))
        inner = expert_linear(x, self.gate_up, placement, is_gated=True)
        combine(residual, expert_linear(inner, self.down, placement), placement, routing.shares)


def triton_experts(
    router: RouterSpec, gate_up: ExpertLinears, down: ExpertLinears, *, dense_router: bool = False
) -> TritonExperts | None:
    """None where the kernels do not take the weights: quantized ones, sizes that are no multiple of 8.

    `dense_router`: the router's product by our kernel too, where the router has the type of the model.
    """
    if not isinstance(gate_up, DenseExperts) or not isinstance(down, DenseExperts):
        return None
    _, inner, hidden = down.weights.shape
    if down.weights.dtype not in DTYPES or router.gate.dtype not in DTYPES or inner % UNIT or hidden % UNIT:
        return None
    if not gate_up.weights.is_contiguous() or not down.weights.is_contiguous():
        return None
    is_sigmoid = router.bias is not None
    if is_sigmoid and router.num_groups > 1 and router.num_groups == len(router.gate):
        return None
    groups = router.num_groups, router.top_groups
    rule = RoutingRule(router.top_k, router.normalise, router.scale, is_sigmoid, *groups)
    gate, own = router.gate, None
    if dense_router and gate.dtype == down.weights.dtype:
        own = triton_dense_linear(gate.t(), None)
    logits = partial(F.linear, weight=gate) if own is None else own
    return TritonExperts(router, logits, rule, gate_up.weights, down.weights)
