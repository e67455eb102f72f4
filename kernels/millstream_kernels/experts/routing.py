"""The experts of each token and their shares, from the router's logits.

Mathematics, per row of E logits l, in float32:

    s = softmax(l), or sigmoid(l)                what a share comes from
    c = s, or s + bias                           what decides who is chosen; the bias weighs nothing
    experts in G groups: only those of the best `top_groups` stay; a group is judged by its largest c (softmax), or by
    the sum of its two largest (sigmoid)
    chosen: the k largest c that stay            of equal ones the lower number
    share = s / (sum of the chosen s) * scale    the quotient where shares are normalised

    row of E     | . x . . | . . x x | . . . . |      x: chosen, found one after another
    place          0                1 2               how many chosen ones have lower numbers: no sort

A token's experts come in the order of their numbers, which is the order in which `combine` adds them. A NaN counts as
the largest, so that it is chosen and its token becomes NaN.

Bytes:  E * element size read and 8 k written per token.
FLOPs:  about 3 k * E.   Bound by the k steps of a program, a few us for any number of tokens up to thousands.

Shazeer et al. 2017 (arXiv 1701.06538); DeepSeek-AI 2024 for groups (arXiv 2405.04434) and the bias (arXiv 2412.19437).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from millstream_kernels.arguments import require, require_tensor
from millstream_kernels.variant import TensorCores, Variant

DTYPES = {torch.bfloat16, torch.float16, torch.float32}
MAX_EXPERTS = 4096
NUM_WARPS = 4


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How a model chooses."""

    top_k: int
    normalise: bool
    scale: float = 1.0
    is_sigmoid: bool = False
    num_groups: int = 1
    top_groups: int = 1


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts of T tokens, in the order of their numbers."""

    shares: Tensor  # [T, k], float32
    experts: Tensor  # [T, k], int32


def plan(num_experts: int, rule: RoutingRule) -> tuple[int, int]:
    """Return the sizes of the block of logits, powers of two: groups, experts of a group."""
    return triton.next_power_of_2(rule.num_groups), triton.next_power_of_2(num_experts // rule.num_groups)


@triton.jit
def _best_groups(choice, groups, top_groups, NUM_GROUPS: tl.constexpr, SIZE: tl.constexpr, BY_TWO: tl.constexpr):
    """Whether each of `[groups]` is among the best, judged by `choice` `[groups, size]`."""
    judged = tl.max(choice, 1)
    if BY_TWO:
        places = tl.arange(0, SIZE)[None, :]
        of_best = tl.min(tl.where(choice == judged[:, None], places, 2147483647), 1)
        judged += tl.max(tl.where(places == of_best[:, None], float("-inf"), choice), 1)
    is_best = groups < 0
    for _ in range(top_groups):
        is_left = (groups < NUM_GROUPS) & (is_best == 0)
        highest = tl.max(tl.where(is_left, judged, float("-inf")), 0)
        first = tl.min(tl.where(is_left & (judged == highest), groups, 2147483647), 0)
        is_best |= groups == first
    return is_best


@triton.jit(do_not_specialize=["size", "top_k", "top_groups"])
def route_token(
    logits,
    bias,
    shares_out,
    experts_out,
    size,
    top_k,
    top_groups,
    scale,
    NUM_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """One token. `logits` `[T, size]`; `GROUPS`, `GROUP_SIZE`: of the block, up to powers of two."""
    token = tl.program_id(0).to(tl.int64)
    groups, places = tl.arange(0, GROUPS), tl.arange(0, GROUP_SIZE)
    of_group = size // NUM_GROUPS
    experts = groups[:, None] * of_group + places[None, :]
    is_expert = (groups[:, None] < NUM_GROUPS) & (places[None, :] < of_group)
    raw = tl.load(logits + token * size + experts, mask=is_expert, other=float("-inf")).to(tl.float32)
    if IS_SIGMOID:
        shares = tl.where(is_expert, 1.0 / (1.0 + tl.exp(-raw)), 0.0)
        choice = shares + tl.load(bias + experts, mask=is_expert, other=0.0)
    else:
        highest = tl.max(tl.max(raw, 1), 0)
        weights = tl.exp(raw - highest)
        shares = weights / tl.sum(tl.sum(weights, 1), 0)
        choice = shares
    choice = tl.where(choice != choice, float("inf"), choice)
    choice = tl.where(is_expert, choice, float("-inf"))
    is_open = is_expert
    if NUM_GROUPS > 1:
        is_open &= _best_groups(choice, groups, top_groups, NUM_GROUPS, GROUP_SIZE, IS_SIGMOID)[:, None]

    is_chosen = experts < 0
    for _ in range(top_k):
        is_left = is_open & (is_chosen == 0)
        highest = tl.max(tl.max(tl.where(is_left, choice, float("-inf")), 1), 0)
        first = tl.min(tl.min(tl.where(is_left & (choice == highest), experts, 2147483647), 1), 0)
        is_chosen |= is_expert & (experts == first)
    if NORMALISE:
        shares = shares / (tl.sum(tl.sum(tl.where(is_chosen, shares, 0.0), 1), 0) + 1e-20)
    flat = tl.reshape(is_chosen.to(tl.int32), (GROUPS * GROUP_SIZE,))
    rank = tl.reshape(tl.cumsum(flat, 0) - 1, (GROUPS, GROUP_SIZE))
    targets = token * top_k + rank
    tl.store(shares_out + targets, shares * scale, mask=is_chosen)
    tl.store(experts_out + targets, experts, mask=is_chosen)


def route(logits: Tensor, rule: RoutingRule, bias: Tensor | None = None) -> Routing:
    """Choose the experts of each row of `logits`.

    Args:
        logits: `[T, E]`, contiguous, bfloat16, float16 or float32; E is a multiple of `rule.num_groups`, at most 4096.
        bias: `[E]` float32, added for the choice alone; with a sigmoid, and only there.

    Raises:
        KernelArgumentError: naming the argument.
    """
    require_tensor("logits", logits, (None, None), DTYPES)
    require(logits.is_contiguous(), "logits", "is not contiguous")
    count, size = logits.shape
    groups, best = rule.num_groups, rule.top_groups
    require(0 < size <= MAX_EXPERTS, "logits", f"has {size} experts; 1 to {MAX_EXPERTS} are expected")
    require(groups > 0 and size % groups == 0, "rule", f"has {groups} groups for {size} experts")
    require(0 < best <= groups, "rule", f"takes {best} of {groups} groups")
    open_experts = size // groups * best
    require(0 < rule.top_k <= open_experts, "rule", f"takes {rule.top_k} of {open_experts} experts")
    pairs = not rule.is_sigmoid or groups == 1 or size // groups > 1
    require(pairs, "rule", "judges a group by two experts, and groups have one")
    require((bias is not None) == rule.is_sigmoid, "bias", "goes with a sigmoid, and only with it")
    if bias is not None:
        require_tensor("bias", bias, (size,), {torch.float32})
        require(bias.is_contiguous(), "bias", "is not contiguous")
    shares = torch.empty((count, rule.top_k), dtype=torch.float32, device=logits.device)
    experts = torch.empty((count, rule.top_k), dtype=torch.int32, device=logits.device)
    if count:
        route_token[(count,)](
            logits,
            shares if bias is None else bias,
            shares,
            experts,
            size,
            rule.top_k,
            best,
            rule.scale,
            **_constants(size, rule),
            num_warps=NUM_WARPS,
        )
    return Routing(shares, experts)


def _constants(num_experts: int, rule: RoutingRule) -> dict[str, int | bool]:
    groups, group_size = plan(num_experts, rule)
    return {
        "NUM_GROUPS": rule.num_groups,
        "GROUPS": groups,
        "GROUP_SIZE": group_size,
        "IS_SIGMOID": rule.is_sigmoid,
        "NORMALISE": rule.normalise,
    }


def routing_variants() -> Iterator[Variant]:
    """Mixtral (8 experts), Qwen3 (128), DeepSeek-V2 and V2-Lite (160 in 8 groups, 64), DeepSeek-V3 (256 in 8)."""
    v2 = RoutingRule(6, normalise=False, num_groups=8, top_groups=3)
    v3 = RoutingRule(8, normalise=True, is_sigmoid=True, num_groups=8, top_groups=4)
    formats = [("bf16", 8, RoutingRule(2, True)), ("bf16", 128, RoutingRule(8, True))]
    formats += [("fp32", 64, RoutingRule(6, False)), ("fp32", 160, v2), ("fp32", 256, v3)]
    for dtype, num_experts, rule in formats:
        arguments = {"logits": f"*{dtype}", "bias": "*fp32", "shares_out": "*fp32", "experts_out": "*i32"}
        arguments |= {"size": "i32", "top_k": "i32", "top_groups": "i32", "scale": "fp32"}
        yield Variant(
            f"{dtype}-{num_experts}{'-sigmoid' if rule.is_sigmoid else ''}-groups{rule.num_groups}",
            route_token,
            arguments,
            _constants(num_experts, rule),
            TensorCores.NONE,
            NUM_WARPS,
            wide_loads=False,
        )
