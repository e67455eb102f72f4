"""Every case's plan is the one that was read and approved, byte for byte; and the ones that people know by heart."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from millstream_operator.api.plan_status import PlanStatus
from millstream_operator.planning.plan import Infeasible, Plan, Rejected
from tests.unit.operator.planning.cases import CASES, Case

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_the_approved_one(name: str) -> None:
    found = CASES[name].plan().status_plan()
    found.pop("factsHash", None)  # of the whole catalogue: it has tests of its own
    text = json.dumps(found, indent=2, ensure_ascii=False) + "\n"
    path = GOLDEN / f"{name}.json"
    if os.environ.get("MILLSTREAM_WRITE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text, "golden/README.md says how to write it anew"


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_what_the_status_can_hold(name: str) -> None:
    """Strict: an unknown or too long field would be refused by the API server, and the status never written."""
    PlanStatus.model_validate_json(json.dumps(CASES[name].plan().status_plan()))


def planned(name: str) -> Plan:
    found = CASES[name].plan()
    assert isinstance(found, Plan)
    return found


def test_seventy_billion_in_16_bit_take_four_a100() -> None:
    plan = planned("70b-fp16-a100-80gb-x4")
    assert (plan.tensor_parallel_size, plan.quantization) == (4, "None")
    assert any("TP2" in line.summary and "KV cache" in line.reason for line in plan.rejected)


def test_pcie_cards_with_bridged_pairs_share_layers_over_pcie() -> None:
    """A common machine: four A100 80GB PCIe. Its links cost what they cost."""
    plan, nvlink = planned("70b-fp16-a100-80gb-pcie-x4"), planned("70b-fp16-a100-80gb-x4")
    assert (plan.gpus_per_replica, plan.tensor_parallel_size) == (4, 4)
    assert plan.predicted is not None
    assert nvlink.predicted is not None
    assert plan.predicted.ttft_milliseconds > 1.3 * nvlink.predicted.ttft_milliseconds
    (link,) = [one.reason for one in plan.reasons if "slowest link" in one.reason]
    assert f"predicted ITL {plan.predicted.itl_microseconds / 1000:.1f} ms" in link


def test_a_feasible_alternative_shows_its_itl_and_the_choices() -> None:
    plan = planned("8b-the-cheapest-of-a-mixed-cluster")
    assert plan.predicted is not None
    feasible = [line for line in plan.rejected if "Costs" in line.reason or "GPUs a replica where" in line.reason]
    assert feasible
    for line in feasible:
        assert line.itl_microseconds is not None
        assert f"predicted ITL {line.itl_microseconds / 1000:.1f} ms" in line.reason
        assert f"the choice's {plan.predicted.itl_microseconds / 1000:.1f} ms" in line.reason


def test_seventy_billion_in_4_bit_take_one() -> None:
    plan = planned("70b-awq-a100-80gb")
    assert (plan.summary, plan.gpus_per_replica) == ("1×A100-80GB TP1 AWQ", 1)


def test_with_a_draft_on_two_small_a100() -> None:
    plan = planned("70b-awq-draft-8b-awq-a100-40gb-x2")
    assert (plan.summary, plan.speculation.method) == ("2×A100-40GB TP2 AWQ", "DraftModel")
    assert plan.speculation.max_draft_tokens == 5
    assert (plan.engine.max_num_batched_tokens, plan.engine.max_num_seqs) == (32768, 256)


def test_startup_is_one_gpu_and_the_warning() -> None:
    plan = planned("8b-awq-startup-a100-40gb")
    assert plan.summary == "1×A100-40GB TP1 AWQ"
    assert any("Warning: 4 bit" in reason.reason for reason in plan.reasons)


def test_a_chatbot_drafts_four_tokens_by_n_grams() -> None:
    plan = planned("14b-awq-chat-a10g")
    assert (plan.speculation.method, plan.speculation.max_draft_tokens) == ("NGram", 4)
    assert (plan.engine.max_num_seqs, plan.engine.gpu_memory_utilization_percent) == (128, 85)


@pytest.mark.parametrize(("name", "tensor"), [("72b-awq-batch-a100-80gb-x4", 1), ("72b-awq-batch-l4-x4", 4)])
def test_a_batch_runs_512_sequences(name: str, tensor: int) -> None:
    plan = planned(name)
    assert (plan.engine.max_num_seqs, plan.tensor_parallel_size) == (512, tensor)
    assert (plan.engine.gpu_memory_utilization_percent, plan.speculation.method) == (95, "Disabled")


def test_what_the_runtime_lacks_is_not_chosen_by_itself() -> None:
    plan = planned("chat-on-a-runtime-without-speculation")
    assert plan.speculation.method == "Disabled"
    assert any("NGram" in line.summary for line in plan.rejected)
    assert planned("70b-h100-fp8-only-where-it-can").quantization == "None"
    assert planned("70b-h100-fp8").quantization == "FP8"


def test_four_bit_of_a_16_bit_source_needs_a_checkpoint_first() -> None:
    assert "quantizedCheckpoint" in planned("awq-asked-of-16-bit").requires


def four_bits(name: str) -> Rejected:
    (found,) = [line for line in planned(name).rejected if "AWQ" in line.summary]
    return found


def test_four_bits_that_save_gpus_are_shown_with_their_figures_and_how_to_have_them() -> None:
    line = four_bits("70b-fp16-a100-80gb-x4-four-bits-can-run")
    assert planned("70b-fp16-a100-80gb-x4-four-bits-can-run").quantization == "None", "not by itself"
    assert (line.summary, line.gpus_per_replica) == ("1×A100-80GB TP1 AWQ", 1)
    assert line.itl_microseconds is not None
    assert "where the choice takes 4" in line.reason
    for field in ("quantization.method AWQ", "quantization.calibration", "qualityGate"):
        assert field in line.reason


def test_what_the_runtime_cannot_run_is_not_advised() -> None:
    reason = four_bits("70b-fp16-a100-80gb-x4").reason
    assert "loads no AWQ weights on a GPU" in reason
    assert "To have it" not in reason


def test_four_bits_that_save_nothing_or_cost_quality_are_not_advised() -> None:
    assert "as many GPUs per replica" in four_bits("14b-fp16-a100-80gb").reason
    code = four_bits("70b-fp16-a100-80gb-x4-code")
    assert (code.summary, code.gpus_per_replica) == ("AWQ weights", 0)
    assert "profile Code" in code.reason


def test_a_model_larger_than_a_node_is_cut_into_stages() -> None:
    plan = planned("405b-bf16-two-nodes")
    assert (plan.tensor_parallel_size, plan.pipeline_parallel_size) == (8, 2)
    assert "pipelineParallelSize=2" in plan.requires


def test_load_latency_and_budget_are_kept() -> None:
    plan = planned("8b-load-latency-budget")
    assert plan.predicted is not None
    assert plan.cost is not None
    assert plan.replicas is not None
    assert plan.replicas * plan.predicted.requests_per_minute >= 900
    assert plan.predicted.ttft_milliseconds <= 300
    assert plan.predicted.itl_microseconds <= 30_000
    assert plan.cost.monthly_usd <= 20_000


@pytest.mark.parametrize(
    ("name", "constraint", "fixed"),
    [
        ("no-memory-70b-on-one-a100", "memory", "gpus"),
        ("no-memory-8b-long-context", "memory", "engine.maxModelLen"),
        ("no-tensor-parallel-3", "parallelism", "parallelism.tensor"),
        ("no-awq-shards-of-72b-unpadded", "parallelism", ""),
        ("no-fp8-on-ampere", "quantization", "quantization.method"),
        ("no-budget", "budget", "budget.maxMonthlyUSD"),
        ("no-latency", "latency", "objectives.ttft.p95"),
        ("no-gpus-for-the-replicas", "inventory", "replicas"),
        ("no-such-product", "products", "accelerator.products"),
        ("no-startup-for-70b", "memory", "parallelism.tensor"),
        ("no-draft-with-another-vocabulary", "speculation", "speculation.method"),
        ("no-method-but-the-checkpoints-own", "quantization", "quantization.method"),
        ("no-support-for-amd", "products", "gpus"),
        ("no-memory-70b-on-one-l4", "memory", "gpus"),
        ("no-memory-deepseek-v3-on-l4", "memory", "gpus"),
        ("no-memory-and-no-format-deepseek-v3-on-l4", "memory", ""),
        ("no-two-latencies", "latency", "objectives.ttft.p95, objectives.itl.p95"),
    ],
)
def test_what_does_not_fit_names_what_binds_and_what_would_do(name: str, constraint: str, fixed: str) -> None:
    found = CASES[name].plan()
    assert isinstance(found, Infeasible)
    assert found.constraint == constraint
    assert found.message.endswith(".")
    assert not fixed or fixed in [fix.field for fix in found.fixes]


def test_a_rejected_line_says_how_much_memory_is_missing_and_hopeless_sizes_share_one() -> None:
    found = Case("meta-llama/Llama-3.1-405B-Instruct", ("L4:4", "A100-80GB:4")).plan()
    assert isinstance(found, Infeasible)
    assert "GB are missing" in found.message
    memory = {line.summary: line.reason for line in found.rejected if "of weights leave" in line.reason}
    assert "1, 2 or 4×L4-24GB BF16" in memory
    assert "1, 2 or 4×A100-80GB BF16" in memory
    for summary, reason in memory.items():
        assert re.search(r"[0-9.]+ GB are missing\.$", reason), summary
    assert memory["1, 2 or 4×L4-24GB BF16"].startswith("As 4×L4-24GB TP4 BF16:"), "the one that lacks least"
