"""A summary names the dtype that the runtime computes in, and no stored plan becomes outdated by these words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from millstream_operator.catalog.gpu import load_catalog
from millstream_operator.catalog.read_shape import read_shape
from millstream_operator.inventory.node_kinds import Inventory, inventory_of
from millstream_operator.planning.facts import EVERYTHING
from millstream_operator.planning.facts_hash import facts_hash
from millstream_operator.planning.plan import Plan
from millstream_operator.planning.planner import decide
from millstream_operator.planning.sizing.memory_ledger import kv_bytes_per_token
from millstream_operator.planning.sizing.weights import rank_weights, weight_format
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.revision import Revision, render_revision
from millstream_operator.rollout.outdated import outdated
from tests.support.llmdeployments import deployment
from tests.unit.operator.planning.cases import DEFAULTS, LLAMA_8B, LLAMA_70B, Case

CASE = Case(LLAMA_70B, ("A100-80GB:4",))
TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 512,
}


def planned(case: Case, gpus: Inventory | None = None, **shape: Any) -> Plan:
    facts = case.facts()
    facts = replace(facts, inventory=gpus or facts.inventory)
    assert facts.shape is not None
    found = decide(case.deployment(), DEFAULTS, replace(facts, shape=replace(facts.shape, **shape)))
    assert isinstance(found, Plan)
    return found


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "BF16"),
        ({"dtype": "bfloat16"}, "BF16"),
        ({"torch_dtype": "float16"}, "FP16"),
        ({"dtype": "float32"}, "FP32"),
        ({}, "FP32"),  # the runtime reads no dtype as float32
        ({"dtype": "float8_e4m3fn"}, "BF16"),
    ],
)
def test_the_dtype_is_the_one_that_the_runtime_takes(config: dict[str, str], dtype: str) -> None:
    assert read_shape(TINY | config).dtype == dtype


def test_weights_as_they_are_read_with_their_dtype() -> None:
    assert planned(CASE).summary == "4×A100-80GB TP4 BF16"
    assert planned(CASE, dtype="FP16").summary == "4×A100-80GB TP4 FP16"
    assert planned(CASE).quantization == "None", "the API's word stays"


def test_float32_takes_twice_the_memory_of_weights_and_keys() -> None:
    """As the runtime reserves it: its KV pool and its weights have the dtype that it computes in."""
    half, single, unnamed = (read_shape(TINY | config) for config in ({"dtype": "float16"}, {"dtype": "float32"}, {}))
    wide = [rank_weights(shape, weight_format(shape, "None")).total_bytes for shape in (half, single, unnamed)]
    tokens = [kv_bytes_per_token(shape, "None") for shape in (half, single, unnamed)]
    for of_half, of_single, of_unnamed in (wide, tokens):
        assert of_single == of_unnamed == 2 * of_half
    assert kv_bytes_per_token(single, "FP8") == kv_bytes_per_token(half, "FP8")


def test_a_plan_in_float32_says_why_it_takes_twice_the_memory() -> None:
    found = planned(Case(LLAMA_8B, ("A100-80GB:1",)), dtype="FP32")
    assert found.memory is not None
    assert found.memory.weights_bytes + found.memory.embeddings_bytes == 4 * 8_030_261_248
    reasons = {one.field: one.reason for one in found.reasons}
    assert reasons["quantization"].startswith("The runtime computes in FP32, because config.json names float32 or no")
    assert reasons["kvCache"].startswith("Keys and values stay in 32 bit")


def test_float32_is_predicted_at_the_rate_of_the_cuda_cores() -> None:
    """An A100 has 16 times the arithmetic in BF16, and prompts are bound by it."""
    half, single = (planned(Case(LLAMA_8B, ("A100-80GB:1",)), dtype=dtype).predicted for dtype in ("BF16", "FP32"))
    assert half is not None
    assert single is not None
    assert single.ttft_milliseconds == pytest.approx(16 * half.ttft_milliseconds, rel=0.05)
    assert single.itl_microseconds > half.itl_microseconds


def test_float32_takes_twice_the_bytes_of_an_all_reduce() -> None:
    """Over links so slow that a prompt is bound by them."""
    case = Case(LLAMA_8B, ("L4:2",), "parallelism: {tensor: 2}\nengine: {maxModelLen: 1024}")
    slow = inventory_of([(load_catalog({"L4": {"pcieBytesPerSecond": 10_000_000}}).get("L4"), 2)])  # type: ignore[list-item]
    half, single = (planned(case, slow, dtype=dtype).predicted for dtype in ("BF16", "FP32"))
    assert half is not None
    assert single is not None
    assert single.ttft_milliseconds == pytest.approx(2 * half.ttft_milliseconds, rel=0.02)


def test_a_dtype_that_is_not_known_is_not_named() -> None:
    found = decide(deployment(accelerator={"type": "GPU"}), DEFAULTS, replace(CASE.facts(), shape=None))
    assert found.summary == "1×GPU TP1"


def test_no_hash_covers_the_dtype() -> None:
    facts = CASE.facts()
    assert facts.shape is not None
    assert facts_hash(facts) == facts_hash(replace(facts, shape=replace(facts.shape, dtype="FP16")))
    assert planned(CASE).input_hash == planned(CASE, dtype="FP16").input_hash
    assert "dtype" not in planned(CASE).status_plan()


@pytest.mark.parametrize(("preferred", "is_outdated"), [("1×L4-24GB TP1 None", False), ("1×T4-16GB TP1 None", True)])
def test_what_an_older_version_preferred_is_compared_without_its_word_for_no_method(
    preferred: str, is_outdated: bool
) -> None:
    """Today's choice is an L4. It was preferred already then, or it is a better one that came since."""
    case = Case(LLAMA_8B, ("L4:1", "A100-80GB:1"), "engine: {maxModelLen: 2048}", runtime=EVERYTHING)
    owner, facts = case.deployment(), case.facts()

    def render(plan: Plan) -> Revision:
        return render_revision(owner, plan, PodDefaults())

    on_a100 = planned(Case(LLAMA_8B, ("A100-80GB:1",), "engine: {maxModelLen: 2048}"))
    pinned = render(on_a100)
    stored = {**pinned.plan, "summary": "1×A100-80GB TP1 None", "preferred": preferred}
    found = outdated(replace(pinned, plan=stored), facts, lambda known: decide(owner, DEFAULTS, known), render)
    assert (found is not None) == is_outdated
