"""A draft on GPUs: what the spec says of it is planned as it is loaded, or refused with the fix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from millstream_operator.catalog.gpu_names import parse_island
from millstream_operator.catalog.known_models import known_shape
from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.inventory.node_kinds import inventory_of
from millstream_operator.planning.facts import EVERYTHING, Facts
from millstream_operator.planning.plan import Infeasible, Plan, PlanDefaults
from millstream_operator.planning.planner import decide
from millstream_operator.planning.requires import refusal
from tests.support.llmdeployments import deployment


def shape(name: str) -> ModelShape:
    found = known_shape(name)
    assert found is not None
    return found


TARGET, DRAFT = shape("meta-llama/Llama-3.1-8B-Instruct"), shape("meta-llama/Llama-3.2-1B-Instruct")
AWQ = shape("hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4")
SOURCE = {"huggingFace": {"repository": "org/draft"}}
FACTS = Facts(shape=TARGET, draft_is_inspected=True)


def decided(draft: ModelShape, facts: Facts = FACTS, gpus: str | None = "H100-80GB:2", **speculation: Any) -> Any:
    islands = inventory_of([parse_island(facts.catalog, gpus)]) if gpus is not None else None
    owner = deployment(accelerator={"type": "GPU"}, speculation=speculation, parallelism={"tensor": 1})
    return decide(owner, PlanDefaults("image:1"), replace(facts, draft_shape=draft, inventory=islands))


@pytest.mark.parametrize("gpus", ["H100-80GB:2", None], ids=["known", "unknown"])
@pytest.mark.parametrize(
    ("draft", "asked", "said"),
    [
        (DRAFT, "AWQ", "speculation.draftModel.quantizationMethod is AWQ, but the draft is stored as None: leave it"),
        (AWQ, "None", "speculation.draftModel.quantizationMethod is None, but the draft is stored as AWQ: leave it"),
    ],
)
def test_a_format_that_the_draft_is_not_stored_in_is_refused_and_not_ignored(
    draft: ModelShape, asked: str, said: str, gpus: str | None
) -> None:
    found = decided(draft, gpus=gpus, draftModel={"source": SOURCE, "quantizationMethod": asked})
    assert isinstance(found, Infeasible)
    assert found.constraint == "speculation"
    assert found.message.startswith(said)


def test_a_draft_with_more_weights_than_its_target_is_refused_as_the_runtime_does() -> None:
    """1.24 billion parameters in 16 bit; 8.03 billion are 16.06 GB."""
    facts, spec = replace(FACTS, shape=DRAFT), {"source": SOURCE}
    found = decided(TARGET, facts, draftModel=spec)
    assert isinstance(found, Infeasible)
    assert found.constraint == "speculation"
    assert found.message.startswith("The weights of speculation.draftModel take 16.06 GB, more than the target")
    assert {fix.field for fix in found.fixes} == {"speculation.method"}
    assert isinstance(decided(TARGET, FACTS, draftModel=spec), Plan), "the same size is what a person may ask for"


@pytest.mark.parametrize(("draft", "asked"), [(DRAFT, "Auto"), (DRAFT, "None"), (AWQ, "AWQ"), (AWQ, "Auto")])
def test_the_format_that_it_is_stored_in_is_planned(draft: ModelShape, asked: str) -> None:
    found = decided(draft, draftModel={"source": SOURCE, "quantizationMethod": asked})
    assert isinstance(found, Plan), found.message
    assert found.requires == ()


def test_a_runtime_that_quantizes_while_it_loads_may_do_so_with_a_draft_of_16_bits() -> None:
    able = replace(FACTS, runtime=EVERYTHING)
    assert isinstance(decided(DRAFT, able, draftModel={"source": SOURCE, "quantizationMethod": "FP8"}), Plan)
    assert isinstance(decided(AWQ, able, draftModel={"source": SOURCE, "quantizationMethod": "FP8"}), Infeasible)


def test_acceptance_by_distribution_is_refused_on_a_gpu_which_would_ignore_it() -> None:
    found = decided(DRAFT, draftModel={"source": SOURCE}, acceptance="Distribution")
    assert isinstance(found, Plan)
    assert found.requires == ("gpuAcceptance=Distribution",)
    assert "acceptance Distribution on a GPU (leave speculation.acceptance out" in (refusal(found.requires) or "")
    assert decided(DRAFT, draftModel={"source": SOURCE}, acceptance="Identity").requires == ()
