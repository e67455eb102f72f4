"""The cases of the golden files: a spec, GPUs, and what the planner may choose."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.load import loads_manifest
from millstream_operator.catalog.gpu import load_catalog
from millstream_operator.catalog.gpu_names import parse_island
from millstream_operator.catalog.known_models import known_shape
from millstream_operator.inventory.node_kinds import inventory_of, whole_catalog
from millstream_operator.planning.facts import EVERYTHING, Facts
from millstream_operator.planning.plan import Infeasible, Plan, PlanDefaults
from millstream_operator.planning.planner import decide
from millstream_runtime.config import Capabilities

CATALOG = load_catalog()
# A runtime that can little, fixed here so that golden files do not change with every capability that is added.
FIRST_RUNTIME = Capabilities(
    model_families=frozenset({"llama"}),
    sources=frozenset({"local"}),
    quantization_methods=frozenset({"None"}),
    cpu_quantization_methods=frozenset({"None"}),
    online_quantization_methods=frozenset(),
    kv_cache_methods=frozenset({"None"}),
    speculation_methods=frozenset({"Disabled"}),
    max_tensor_parallel_size=1,
    max_pipeline_parallel_size=1,
)
LLAMA_70B = "meta-llama/Meta-Llama-3-70B-Instruct"
LLAMA_70B_AWQ = "casperhansen/llama-3-70b-instruct-awq"
LLAMA_8B = "meta-llama/Meta-Llama-3-8B-Instruct"
LLAMA_8B_AWQ = "casperhansen/llama-3-8b-instruct-awq"
DEFAULTS = PlanDefaults("registry.example.com/millstream-runtime:1.0")


@dataclass(frozen=True)
class Case:
    repository: str
    gpus: tuple[str, ...] = ()  # empty: the whole catalogue
    spec: str = ""
    draft: str | None = None
    choosable: Capabilities = field(default=EVERYTHING)
    runtime: Capabilities = field(default=FIRST_RUNTIME)

    def deployment(self) -> LLMDeployment:
        spec = textwrap.dedent(self.spec)
        if self.draft is not None:
            spec += f"\nspeculation: {{draftModel: {{source: {{huggingFace: {{repository: {self.draft}}}}}}}}}"
        head = "apiVersion: millstream.dev/v1alpha1\nkind: LLMDeployment\nmetadata: {name: case}\nspec:\n"
        source = f"model: {{source: {{huggingFace: {{repository: {self.repository}}}}}}}\n"
        return loads_manifest(head + textwrap.indent(source + spec, "  "))

    def facts(self) -> Facts:
        islands = [parse_island(CATALOG, text) for text in self.gpus]
        return Facts(
            shape=known_shape(self.repository),
            draft_shape=known_shape(self.draft) if self.draft else None,
            inventory=inventory_of(islands) if islands else whole_catalog(CATALOG),
            catalog=CATALOG,
            runtime=self.runtime,
            choosable=self.choosable,
        )

    def plan(self) -> Plan | Infeasible:
        return decide(self.deployment(), DEFAULTS, self.facts())


def infeasible(repository: str, gpus: tuple[str, ...], spec: str = "", draft: str | None = None) -> Case:
    """A case without a plan, on a runtime that can run all that is offered as a fix."""
    return Case(repository, gpus, spec, draft, runtime=EVERYTHING)


CASES: dict[str, Case] = {
    # The configurations that production write-ups arrive at by hand.
    "70b-fp16-a100-80gb-x4": Case(LLAMA_70B, ("A100-80GB:4",), "engine: {maxModelLen: 8192}"),
    "70b-fp16-a100-80gb-pcie-x4": Case(LLAMA_70B, ("A100-80GB-PCIe:4",)),
    "70b-awq-a100-80gb": Case(LLAMA_70B_AWQ, ("A100-80GB:1",)),
    "70b-awq-draft-8b-awq-a100-40gb-x2": Case(LLAMA_70B_AWQ, ("A100-40GB:2",), "tier: Mid", draft=LLAMA_8B_AWQ),
    "8b-awq-startup-a100-40gb": Case(LLAMA_8B_AWQ, ("A100-40GB:1",), "tier: Startup"),
    "14b-awq-chat-a10g": Case("Qwen/Qwen2.5-14B-Instruct-AWQ", ("A10G:1",), "workload: {profile: Chat}"),
    "72b-awq-batch-a100-80gb-x4": Case("Qwen/Qwen2.5-72B-Instruct-AWQ", ("A100-80GB:4",), "workload: {profile: Batch}"),
    "72b-awq-batch-l4-x4": Case("Qwen/Qwen2.5-72B-Instruct-AWQ", ("L4:4",), "workload: {profile: Batch}"),
    # What the runtime cannot do is not chosen, and is listed.
    "chat-on-a-runtime-without-speculation": Case(
        LLAMA_8B, ("A10G:1",), "workload: {profile: Chat}\nengine: {maxModelLen: 1024}", choosable=FIRST_RUNTIME
    ),
    "70b-h100-fp8-only-where-it-can": Case(LLAMA_70B, ("H100:8",), "tier: Mid", choosable=FIRST_RUNTIME),
    "70b-h100-fp8": Case(LLAMA_70B, ("H100:8",), "tier: Mid"),
    # Four bits are shown with their figures where they may be had without a known loss, and never chosen.
    "70b-fp16-a100-80gb-x4-four-bits-can-run": Case(LLAMA_70B, ("A100-80GB:4",), runtime=EVERYTHING),
    "70b-fp16-a100-80gb-x4-code": Case(LLAMA_70B, ("A100-80GB:4",), "workload: {profile: Code}", runtime=EVERYTHING),
    "14b-fp16-a100-80gb": Case("Qwen/Qwen2.5-14B-Instruct", ("A100-80GB:1",), runtime=EVERYTHING),
    "8b-fp8-rounded-while-loading": Case(LLAMA_8B, ("L4:1",), "quantization: {method: FP8}", runtime=EVERYTHING),
    "awq-asked-of-16-bit": Case(LLAMA_70B, ("A100-80GB:1",), "quantization: {method: AWQ}"),
    # Larger than a node, and MLA.
    "405b-bf16-two-nodes": Case(
        "meta-llama/Llama-3.1-405B-Instruct", ("H100:8", "H100:8"), "tier: Enterprise\nquantization: {method: None}"
    ),
    "deepseek-v3-h200-x8": Case("deepseek-ai/DeepSeek-V3", ("H200:8",), "tier: Enterprise"),
    # Load, latency and budget decide.
    "8b-load-latency-budget": Case(
        LLAMA_8B,
        ("L4:4", "A100-40GB:8", "H100:8"),
        """\
        workload: {profile: Chat, inputTokens: 800, outputTokens: 200, requestsPerMinute: 900}
        objectives: {ttft: {p95: 300ms}, itl: {p95: 30ms}}
        budget: {maxMonthlyUSD: 20000}
        """,
    ),
    "70b-any-gpu-of-the-catalogue": Case(LLAMA_70B_AWQ, (), "tier: Mid"),
    "8b-the-cheapest-of-a-mixed-cluster": Case(
        LLAMA_8B, ("H100:8", "A100-80GB:4", "L4:4", "T4:1"), "engine: {maxModelLen: 4096}"
    ),
    # There is no plan.
    "no-memory-70b-on-one-a100": infeasible(LLAMA_70B, ("A100-80GB:1",)),
    "no-memory-8b-long-context": infeasible(
        "meta-llama/Llama-3.1-8B-Instruct", ("L4:1",), "engine: {maxModelLen: 131072}"
    ),
    "no-tensor-parallel-3": infeasible(LLAMA_70B, ("A100-80GB:4",), "parallelism: {tensor: 3}"),
    "no-awq-shards-of-72b-unpadded": infeasible(
        "Qwen/Qwen2.5-72B-Instruct", ("A100-40GB:4",), "quantization: {method: AWQ}\nparallelism: {tensor: 4}"
    ),
    "no-fp8-on-ampere": infeasible(LLAMA_70B, ("A100-80GB:4",), "quantization: {method: FP8}"),
    "no-budget": infeasible(LLAMA_70B, ("A100-80GB:4",), "budget: {maxMonthlyUSD: 5000}"),
    "no-latency": infeasible(LLAMA_70B, ("A100-80GB:8",), "objectives: {ttft: {p95: 20ms}}"),
    "no-gpus-for-the-replicas": infeasible(LLAMA_8B, ("L4:1",), "replicas: 3\nengine: {maxModelLen: 4096}"),
    "no-such-product": infeasible(LLAMA_8B, ("L4:1",), "accelerator: {products: [A100-80GB]}"),
    "no-startup-for-70b": infeasible(LLAMA_70B, ("A100-80GB:4",), "tier: Startup"),
    "no-draft-with-another-vocabulary": infeasible(
        LLAMA_70B_AWQ, ("A100-80GB:1",), "tier: Mid", draft="Qwen/Qwen2.5-0.5B"
    ),
    "no-method-but-the-checkpoints-own": infeasible(LLAMA_70B_AWQ, ("A100-80GB:1",), "quantization: {method: None}"),
    "no-memory-70b-on-one-l4": infeasible(LLAMA_70B, ("L4:1",)),
    "no-memory-deepseek-v3-on-l4": infeasible("deepseek-ai/DeepSeek-V3", ("L4:8",)),
    "no-memory-and-no-format-deepseek-v3-on-l4": Case("deepseek-ai/DeepSeek-V3", ("L4:8",)),
    "no-two-latencies": infeasible(LLAMA_70B, ("A100-80GB:8",), "objectives: {ttft: {p95: 20ms}, itl: {p95: 2ms}}"),
    "no-support-for-amd": infeasible(LLAMA_8B, ("MI300X:8",)),
}
