"""Placements to look at, and the verdict on each: feasible with its ledger, prediction and cost, or one problem.

kinds of nodes × tensor × pipeline × format -> Candidate -> evaluate -> Outcome
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum

from millstream_operator.catalog.gpu import MINIMUM_SM, MINIMUM_SM_KV_CACHE
from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.inventory.node_kinds import Inventory, Stock
from millstream_operator.planning.choices.quantization import Formats
from millstream_operator.planning.plan import SpeculationPlan
from millstream_operator.planning.resolved_spec import ResolvedSpec
from millstream_operator.planning.sizing.cost import Cost, cost_of
from millstream_operator.planning.sizing.memory_ledger import (
    MemoryLedger,
    activations_bytes,
    gpu_ledger,
    kv_bytes_per_token,
)
from millstream_operator.planning.sizing.roofline import Machine, Prediction, SpeculationSpeed, predict, step_seconds
from millstream_operator.planning.sizing.tensor_parallel import sizes, tensor_parallel_problem
from millstream_operator.planning.sizing.weights import RankWeights, rank_weights, weight_format

P95_MARGIN = 1.25  # of a p95 with queueing over the prediction without
LOAD_HEADROOM = 0.8  # a replica is planned to be this busy
SHORTEST_STEP_TOKENS = 512
MAX_PIPELINE = 16


class Stage(IntEnum):
    """How far a candidate came. What stopped the one that came farthest is the binding constraint."""

    PRODUCTS, PARALLELISM, QUANTIZATION, SPECULATION, MEMORY, LATENCY, LOAD, INVENTORY, BUDGET, DONE = range(10)

    @property
    def constraint(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Problem:
    """`shortfall` compares problems of one stage: smaller is nearer to feasible."""

    stage: Stage
    sentence: str
    shortfall: float = 0.0


@dataclass(frozen=True, slots=True)
class Question:
    """Everything that candidates are judged by."""

    resolved: ResolvedSpec
    shape: ModelShape
    formats: Formats
    speculation: SpeculationPlan
    draft_shape: ModelShape | None
    draft_method: str | None
    inventory: Inventory


@dataclass(frozen=True, slots=True)
class Candidate:
    stock: Stock
    tensor: int
    pipeline: int
    method: str
    kv_cache: str

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline

    @property
    def summary(self) -> str:
        pipeline = f" PP{self.pipeline}" if self.pipeline > 1 else ""
        return f"{self.gpus}×{self.stock.part.name} TP{self.tensor}{pipeline} {self.method}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """`problem` None: feasible, and all else is there."""

    candidate: Candidate
    problem: Problem | None = None
    max_num_batched_tokens: int = 0
    max_num_seqs: int = 0
    ledger: MemoryLedger | None = None
    prediction: Prediction | None = None
    replicas: int = 1
    cost: Cost | None = None


def candidates(question: Question, *, pipelines: bool) -> Iterator[Candidate]:
    """Placements worth a look. `pipelines`: those of more than one stage, for when one stage cannot do it."""
    resolved, shape = question.resolved, question.shape
    stages = [size for size in _pipelines(resolved, pipelines) if size <= shape.num_layers]
    for stock in question.inventory.stocks():
        for method in question.formats.methods:
            for tensor in _tensors(question, stock, method, pipelines):
                groups = stock.groups(tensor)
                for pipeline in stages:
                    if pipeline == 1 or groups >= pipeline:
                        yield Candidate(stock, tensor, pipeline, method, question.formats.kv_cache)


def _tensors(question: Question, stock: Stock, method: str, pipelines: bool) -> list[int]:
    """What the spec says, or what divides the heads; with stages, the largest that is valid in one island."""
    resolved, shape = question.resolved, question.shape
    if resolved.tensor is not None:
        return [resolved.tensor]
    if resolved.one_gpu:
        return [1]
    found = sizes(shape, stock.island_size)
    if not pipelines:
        return found
    group = weight_format(shape, method).group_size
    return [size for size in found if tensor_parallel_problem(shape, size, group) is None][-1:]


def _pipelines(resolved: ResolvedSpec, pipelines: bool) -> list[int]:
    if resolved.pipeline is not None:
        return [resolved.pipeline]
    return list(range(2, MAX_PIPELINE + 1)) if pipelines else [1]


def evaluate(question: Question, looked_at: Iterable[Candidate]) -> Iterator[Outcome]:
    """Walk the stages of each until one says no. What the number of stages cannot change is asked once."""
    known: dict[tuple[str, str, int], Problem | None] = {}
    for candidate in looked_at:
        key = candidate.stock.part.name, candidate.method, candidate.tensor
        if key not in known:
            known[key] = _unfit(question, candidate)
        problem = known[key]
        yield _sized(question, candidate) if problem is None else Outcome(candidate, problem)


def _unfit(question: Question, candidate: Candidate) -> Problem | None:
    """What speaks against part, parallelism or formats, before any byte is counted."""
    part, tensor, resolved = candidate.stock.part, candidate.tensor, question.resolved
    if part.unsupported is not None:
        return Problem(Stage.PRODUCTS, f"{part.name} is not supported: {part.unsupported}")
    stored = weight_format(question.shape, candidate.method)
    if (why := tensor_parallel_problem(question.shape, tensor, stored.group_size)) is not None:
        return Problem(Stage.PARALLELISM, why)
    if tensor > candidate.stock.gpus:
        return Problem(Stage.PARALLELISM, f"one node has {candidate.stock.gpus} free {part.name}, not {tensor}")
    if tensor > candidate.stock.island_size and resolved.tensor is None:
        return Problem(Stage.PARALLELISM, f"an NVLink island of {part.name} has {candidate.stock.island_size} GPUs")
    for method, minimum in ((candidate.method, MINIMUM_SM), (candidate.kv_cache, MINIMUM_SM_KV_CACHE)):
        if part.sm < minimum[method]:
            needed = f"{minimum[method] // 10}.{minimum[method] % 10}"
            return Problem(
                Stage.QUANTIZATION,
                f"{method} needs compute capability {needed} or newer; {part.name} has {part.compute_capability}",
            )
    draft = question.draft_shape
    if (
        draft is not None
        and question.speculation.method == "DraftModel"
        and draft.vocab_size != question.shape.vocab_size
    ):
        return Problem(
            Stage.SPECULATION,
            f"the draft's vocabulary of {draft.vocab_size} tokens is not the target's of {question.shape.vocab_size}",
        )
    return None


@functools.lru_cache(maxsize=4096)
def _weights(shape: ModelShape, method: str, tensor: int, pipeline: int) -> RankWeights:
    return rank_weights(shape, weight_format(shape, method), tensor, pipeline)


def _machine(question: Question, candidate: Candidate) -> Machine:
    shape = question.shape
    layers = -(-shape.num_layers // candidate.pipeline)
    return Machine(
        part=candidate.stock.part,
        shape=shape,
        weights=_weights(shape, candidate.method, candidate.tensor, candidate.pipeline),
        method=candidate.method,
        tensor=candidate.tensor,
        pipeline=candidate.pipeline,
        kv_bytes=kv_bytes_per_token(shape, candidate.kv_cache, candidate.tensor, layers),
        over_nvlink=candidate.stock.part.has_nvlink and candidate.tensor <= candidate.stock.island_size,
    )


def _draft_machine(question: Question, candidate: Candidate) -> Machine | None:
    """The draft runs on the target's ranks where its heads allow it, else whole on every rank."""
    shape = question.draft_shape
    if question.speculation.method not in ("DraftModel", "EAGLE", "Medusa"):
        return None
    if shape is None:  # EAGLE and Medusa without a shape: a head of about one decoder layer of the target
        shape = _one_layer(question.shape)
    method = question.draft_method or (shape.quantization.method if shape.quantization else "None")
    group = weight_format(shape, method).group_size
    shared = tensor_parallel_problem(shape, candidate.tensor, group) is None
    tensor = candidate.tensor if shared else 1
    return Machine(
        part=candidate.stock.part,
        shape=shape,
        weights=_weights(shape, method, tensor, 1),
        method=method,
        tensor=tensor,
        pipeline=1,
        kv_bytes=kv_bytes_per_token(shape, candidate.kv_cache, tensor),
        over_nvlink=candidate.stock.part.has_nvlink and tensor <= candidate.stock.island_size,
    )


@functools.lru_cache(maxsize=64)
def _one_layer(shape: ModelShape) -> ModelShape:
    p, layers = shape.parameters, shape.num_layers
    parameters = replace(
        p,
        embedding=0,
        head=0,
        attention=p.attention // layers,
        mlp=(p.mlp + p.experts) // layers,
        experts=0,
        routers=0,
        norms=p.norms // layers,
    )
    return replace(
        shape,
        num_layers=1,
        parameters=parameters,
        vocab_size=1,
        num_experts=0,
        num_experts_per_token=0,
        kv_projection_parameters=shape.kv_projection_parameters // layers,
        replicated_attention_parameters=shape.replicated_attention_parameters // layers,
        quantization=None,
    )


def _sized(question: Question, candidate: Candidate) -> Outcome:
    resolved, shape, part = question.resolved, question.shape, candidate.stock.part
    machine, draft = _machine(question, candidate), _draft_machine(question, candidate)
    speculation = _speculation(question.speculation, draft)
    tokens = _short_steps(resolved, machine)
    seqs = resolved.max_num_seqs
    stored = weight_format(shape, candidate.method)
    per_token = machine.kv_bytes + (draft.kv_bytes if draft else 0)
    # The scheduler asks for fewer rows where the latency objective wants it, so two rounds at most a halving.
    while True:
        activations = activations_bytes(
            shape,
            stored,
            tensor=candidate.tensor,
            max_num_batched_tokens=tokens,
            max_num_seqs=seqs,
            draft_tokens=question.speculation.max_draft_tokens,
        )
        ledger = gpu_ledger(
            part,
            resolved.gpu_memory_utilization_percent,
            shape,
            machine.weights,
            activations,
            ranks=candidate.gpus,
            draft=draft.weights if draft else None,
        )
        kv_tokens = ledger.kv_cache_bytes // per_token
        if kv_tokens < resolved.kv_floor_tokens:
            return Outcome(candidate, _no_room(resolved, candidate, ledger, per_token), tokens, seqs, ledger)
        prediction = predict(
            machine,
            kv_cache_tokens=kv_tokens,
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            input_tokens=resolved.input_tokens,
            output_tokens=resolved.output_tokens,
            speculation=speculation,
        )
        if _itl_is_kept(resolved, prediction) or resolved.max_num_seqs_is_given or seqs == 1:
            break
        seqs = max(1, min(seqs, prediction.concurrent_sequences) // 2)
    return _judged(question, Outcome(candidate, None, tokens, seqs, ledger, prediction))


def _judged(question: Question, outcome: Outcome) -> Outcome:
    """Latency, load, GPUs for all replicas, budget."""
    resolved, candidate, prediction = question.resolved, outcome.candidate, outcome.prediction
    assert prediction is not None  # noqa: S101 - the caller predicted
    replicas = _replicas(resolved, prediction)
    cost = cost_of(candidate.stock.part, candidate.gpus, replicas, prediction.tokens_per_second)
    problem = _too_slow(resolved, prediction)
    free = candidate.stock.groups(candidate.tensor) // candidate.pipeline
    if problem is None and free < replicas and not question.inventory.hypothetical:
        stage = Stage.LOAD if resolved.has_load and replicas > resolved.replicas else Stage.INVENTORY
        problem = Problem(
            stage,
            f"{replicas} replicas need {replicas * candidate.gpus} {candidate.stock.part.name} in groups of "
            f"{candidate.tensor}; there is room for {free}",
            replicas - free,
        )
    if problem is None and resolved.budget_is_enforced and cost.monthly_usd > (resolved.max_monthly_usd or 0):
        problem = Problem(
            Stage.BUDGET,
            f"costs ${cost.monthly_usd:,} a month, and budget.maxMonthlyUSD is {resolved.max_monthly_usd:,}",
            cost.monthly_usd,
        )
    return replace(outcome, problem=problem, replicas=replicas, cost=cost)


def _speculation(plan: SpeculationPlan, draft: Machine | None) -> SpeculationSpeed | None:
    if plan.method == "Disabled":
        return None
    # EAGLE and Medusa are planned as a small draft, n-grams as a free one.
    acceptance = plan.assumed_acceptance_percent / 100
    return SpeculationSpeed(draft_tokens=plan.max_draft_tokens, acceptance=acceptance, draft=draft)


def _short_steps(resolved: ResolvedSpec, machine: Machine) -> int:
    """Tokens of a step: halved until a step with a full prefill chunk keeps the ITL objective."""
    tokens = resolved.max_num_batched_tokens
    if resolved.itl_milliseconds is None or resolved.max_num_batched_tokens_is_given:
        return tokens
    smallest = max(SHORTEST_STEP_TOKENS, resolved.max_num_seqs)
    limit_seconds = resolved.itl_milliseconds / 1000 / P95_MARGIN
    while tokens // 2 >= smallest and step_seconds(machine, tokens, 0) > limit_seconds:
        tokens //= 2
    return tokens


def _no_room(resolved: ResolvedSpec, candidate: Candidate, ledger: MemoryLedger, per_token: int) -> Problem:
    need = resolved.kv_floor_tokens * per_token
    requests = resolved.kv_floor_tokens // resolved.max_model_len
    left = max(0, ledger.kv_cache_bytes)
    what = f"{requests} × {resolved.max_model_len} tokens" if requests > 1 else f"{resolved.kv_floor_tokens} tokens"
    weights = ledger.weights_bytes + ledger.embeddings_bytes + ledger.draft_weights_bytes
    return Problem(
        Stage.MEMORY,
        f"{_gb(weights)} of weights leave {_gb(left)} of one {candidate.stock.part.name} for the KV cache; {what} need "
        f"{_gb(need)}",
        (need - ledger.kv_cache_bytes) / ledger.usable_bytes,
    )


def _itl_is_kept(resolved: ResolvedSpec, prediction: Prediction) -> bool:
    limit = resolved.itl_milliseconds
    return limit is None or prediction.itl_microseconds * P95_MARGIN <= limit * 1000


def _too_slow(resolved: ResolvedSpec, prediction: Prediction) -> Problem | None:
    limit, predicted = resolved.ttft_milliseconds, round(prediction.ttft_milliseconds * P95_MARGIN)
    if limit is not None and predicted > limit:
        return Problem(Stage.LATENCY, f"predicted TTFT p95 {predicted} ms, objective {limit} ms", predicted / limit)
    if not _itl_is_kept(resolved, prediction):
        itl = prediction.itl_microseconds * P95_MARGIN / 1000
        return Problem(
            Stage.LATENCY,
            f"predicted ITL p95 {itl:.1f} ms, objective {resolved.itl_milliseconds} ms",
            itl / (resolved.itl_milliseconds or 1),
        )
    return None


def _replicas(resolved: ResolvedSpec, prediction: Prediction) -> int:
    """Enough for the load, each busy to `LOAD_HEADROOM`; without a load, those of the spec."""
    if not resolved.has_load:
        return resolved.replicas
    needed = 1
    if resolved.requests_per_minute is not None:
        needed = max(
            needed, -(-resolved.requests_per_minute // max(1, int(prediction.requests_per_minute * LOAD_HEADROOM)))
        )
    if resolved.concurrency is not None:
        needed = max(needed, -(-resolved.concurrency // prediction.concurrent_sequences))
    return needed


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
