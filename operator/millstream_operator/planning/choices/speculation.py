"""Choose how tokens are proposed, and how many: by tier and workload, within what the planner may choose.

Acceptance is assumed, not measured: the numbers are usual ones of the literature (arXiv 2211.17192, 2401.15077), and
the plan says that it assumed them.
"""

from __future__ import annotations

from dataclasses import dataclass

from millstream_operator.api.optimization import HEAD_METHODS, Speculation
from millstream_operator.api.spec import Accelerator, AcceleratorType, LLMDeploymentSpec
from millstream_operator.api.workload import Profile
from millstream_operator.planning.plan import PlanReason, Rejected, SpeculationPlan
from millstream_runtime.config import Capabilities

DRAFT_TOKENS = {"DraftModel": 5, "EAGLE": 5, "Medusa": 4, "NGram": 4}
ASSUMED_ACCEPTANCE_PERCENT = {"DraftModel": 70, "EAGLE": 80, "Medusa": 60, "NGram": 40}
# Of what `speculation` leaves to Auto: whose answers repeat their prompt.
REPEATING = {
    Profile.CODE: "edited code repeats its prompt",
    Profile.RAG: "answers quote the documents of their prompt",
}
WITHOUT = {
    Profile.CREATIVE: "Open-ended text follows no draft, so checking drafts costs more than it gains.",
    Profile.BATCH: "Full batches leave no idle arithmetic to check drafts with.",
    Profile.EDGE: "A small device has no arithmetic to spare.",
}


@dataclass(frozen=True, slots=True)
class SpeculationChoice:
    plan: SpeculationPlan
    reason: PlanReason
    rejected: tuple[Rejected, ...] = ()


def choose_speculation(spec: LLMDeploymentSpec, choosable: Capabilities) -> SpeculationChoice:
    """What the spec names stands; what it leaves open follows from profile and tier.

    Where `speculation` is absent, a plan is as it was before profiles decided: no stored plan changes.
    """
    wanted = spec.speculation or Speculation()
    method = (wanted.method or "Auto") + ""
    if method == "Auto" and wanted.draft_model is not None:
        return _chosen("DraftModel", wanted, "spec.speculation.draftModel names a draft.")
    if method != "Auto":
        head = ": speculation.draftModel is a draft head" if method in HEAD_METHODS and wanted.draft_model else ""
        return _chosen(method, wanted, f"spec.speculation.method asks for {method}{head}.")
    profile = spec.workload.profile if spec.workload else None
    if profile in WITHOUT and wanted.max_draft_tokens is None:
        return _chosen("Disabled", wanted, WITHOUT[profile])
    if profile is None and spec.tier is None and spec.speculation is None:
        return _chosen("Disabled", wanted, "No tier, profile or method asks for it.")
    who = f"Profile {profile}" if profile else f"Tier {spec.tier}" if spec.tier else "Method Auto"
    on_cpu, insisted = (spec.accelerator or Accelerator()).type is AcceleratorType.CPU, wanted.max_draft_tokens
    methods = choosable.cpu_speculation_methods if on_cpu else choosable.speculation_methods
    if spec.speculation is not None and insisted is None and "NGram" in methods:
        return _by_profile(profile, wanted)
    if on_cpu and insisted is None:
        why = f"{who}: n-grams on a CPU are not chosen by default; method NGram asks for them."
        return _chosen("Disabled", wanted, why)
    if "NGram" not in methods and insisted is None:
        rejected = Rejected(
            f"speculation NGram, {_tokens('NGram', wanted)} tokens",
            "No GPU has measured what n-grams gain; speculation.method NGram asks for them.",
        )
        why = f"{who} would have n-grams; on a GPU they are not chosen by themselves."
        return SpeculationChoice(SpeculationPlan(), PlanReason("speculation", why), (rejected,))
    if profile in WITHOUT:
        why = (
            f"spec.speculation.maxDraftTokens asks for n-grams. With profile {profile} they are not chosen by default."
        )
        return _chosen("NGram", wanted, f"{why} {WITHOUT[profile]}")
    return _chosen("NGram", wanted, f"{who}: n-grams cost no memory and pay where answers repeat their prompt.")


def _by_profile(profile: Profile | None, wanted: Speculation) -> SpeculationChoice:
    """What Auto means without a draft model."""
    if profile in REPEATING:
        return _chosen("NGram", wanted, f"Profile {profile}: n-grams cost no memory, and {REPEATING[profile]}.")
    if profile is Profile.CHAT:
        why = "Profile Chat: a draft model pays where chats are drafted; name one as speculation.draftModel."
        return _chosen("Disabled", wanted, why)
    who = f"With profile {profile}" if profile else "Without a profile"
    return _chosen("Disabled", wanted, f"{who} answers need not repeat their prompt; method NGram asks for n-grams.")


def _chosen(method: str, wanted: Speculation, why: str) -> SpeculationChoice:
    reason = PlanReason("speculation", why)
    if method == "Disabled":
        return SpeculationChoice(SpeculationPlan(), reason)
    rule = (wanted.acceptance or "Identity") + "" if method == "DraftModel" else "Identity"
    plan = SpeculationPlan(method, _tokens(method, wanted), ASSUMED_ACCEPTANCE_PERCENT[method], acceptance=rule)
    return SpeculationChoice(plan, reason)


def _tokens(method: str, wanted: Speculation) -> int:
    return wanted.max_draft_tokens or DRAFT_TOKENS[method]
