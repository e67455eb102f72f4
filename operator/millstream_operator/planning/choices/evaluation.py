"""Evaluate candidates stage by stage: Candidate -> Outcome.

products, parallelism, formats -> memory -> latency -> load -> inventory -> budget
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from millstream_operator.api.optimization import HEAD_METHODS
from millstream_operator.catalog.gpu import MINIMUM_SM, MINIMUM_SM_KV_CACHE
from millstream_operator.planning.choices.candidates import Candidate, Question, correction_for
from millstream_operator.planning.choices.draft_fit import head_problem, vocabulary_problem
from millstream_operator.planning.choices.machines import draft_machine, target_machine
from millstream_operator.planning.choices.outcome import Outcome, Problem, Stage
from millstream_operator.planning.plan import SpeculationPlan
from millstream_operator.planning.resolved_spec import ResolvedSpec
from millstream_operator.planning.sizing.cost import cost_of, monthly_usd, price_caveat
from millstream_operator.planning.sizing.kv_pool import KvPool, kv_pool
from millstream_operator.planning.sizing.memory_ledger import MemoryLedger, activations_bytes, gpu_ledger
from millstream_operator.planning.sizing.roofline import Machine, Prediction, SpeculationSpeed, chunk_seconds, predict
from millstream_operator.planning.sizing.tensor_parallel import MOST_GPUS, allowed_sizes, tensor_parallel_problem
from millstream_operator.planning.sizing.weights import weight_format

P95_MARGIN = 1.25  # of a p95 with queueing over the prediction without
LOAD_HEADROOM = 0.8  # a replica is planned to be this busy
SHORTEST_STEP_TOKENS = 512


def evaluate(question: Question, placements: Iterable[Candidate]) -> Iterator[Outcome]:
    """Check each candidate stage by stage, up to the first problem.

    What does not depend on the number of pipeline stages is checked once per part, method and tensor size.
    """
    known: dict[tuple[str, str, int], Problem | None] = {}
    for candidate in placements:
        key = candidate.stock.part.name, candidate.method, candidate.tensor
        if key not in known:
            known[key] = _incompatibility(question, candidate)
        problem = known[key]
        yield _sized(question, candidate) if problem is None else Outcome(candidate, problem)


def _incompatibility(question: Question, candidate: Candidate) -> Problem | None:
    """Return what rules out the part, the parallelism or the formats, before any byte is counted."""
    part = candidate.stock.part
    if part.unsupported is not None:
        return Problem(Stage.PRODUCTS, f"{part.name} is not supported: {part.unsupported}")
    if (why := _size_problem(question, candidate)) is not None:
        return Problem(Stage.PARALLELISM, why)
    for method, minimum in ((candidate.method, MINIMUM_SM), (candidate.kv_cache, MINIMUM_SM_KV_CACHE)):
        if part.sm < minimum[method]:
            needed = f"{minimum[method] // 10}.{minimum[method] % 10}"
            return Problem(
                Stage.QUANTIZATION,
                f"{method} needs compute capability {needed} or newer; {part.name} has {part.compute_capability}",
            )
    draft, speculation = question.draft_shape, question.speculation.method
    if draft is None or speculation not in ("DraftModel", *HEAD_METHODS):
        return None
    if speculation in HEAD_METHODS:
        why = head_problem(speculation, question.shape, draft)
    else:
        why = vocabulary_problem(question.shape, draft)
    return Problem(Stage.SPECULATION, why) if why is not None else None


def _size_problem(question: Question, candidate: Candidate) -> str | None:
    """Return what rules out the tensor-parallel size: every cause, or a person who mends one would meet the next."""
    tensor, stock, shape = candidate.tensor, candidate.stock, question.shape
    group = weight_format(shape, candidate.method).group_size
    of_model = tensor_parallel_problem(shape, tensor, group)
    divides_heads, fits_a_node = shape.num_heads % tensor == 0, tensor <= stock.gpus
    if question.resolved.tensor is None or (divides_heads and fits_a_node):
        return of_model
    causes = [of_model] if of_model is not None else []
    if not divides_heads:
        causes[0] += f" (the model allows {allowed_sizes(shape, MOST_GPUS, group)})"
    if not fits_a_node:
        causes.append(f"the GPUs that share a layer are in one node, and {_most_gpus(question, candidate)}")
    return f"parallelism.tensor is {tensor}: {'; '.join(causes)}"


def _most_gpus(question: Question, candidate: Candidate) -> str:
    """Say how many GPUs of the part a node has: those that are free, where others are taken."""
    stock = candidate.stock
    if question.inventory.hypothetical:
        return f"a usual machine has {stock.gpus} {stock.part.name}"
    return f"no node has more than {stock.gpus} {'free ' if question.only_free else ''}{stock.part.name}"


def _sized(question: Question, candidate: Candidate) -> Outcome:
    """Size one candidate: its memory ledger, then its prediction, with fewer sequences where the ITL needs it."""
    resolved = question.resolved
    machine, draft = target_machine(question, candidate), draft_machine(question, candidate)
    speculation = _speculation(question.speculation, draft)
    tokens = _max_step_tokens(resolved, machine)
    seqs = resolved.max_num_seqs
    while True:
        ledger = _ledger(question, candidate, machine, draft, tokens, seqs)
        pool = _kv_pool(question, machine, draft, tokens, seqs)
        need_bytes = pool.bytes_for(resolved.kv_floor_requests)
        if ledger.kv_cache_bytes < need_bytes:
            return Outcome(candidate, _memory_problem(resolved, candidate, ledger, need_bytes), tokens, seqs, ledger)
        prediction = predict(
            machine,
            kv_cache_tokens=pool.tokens(ledger.kv_cache_bytes),
            kv_cache_requests=pool.requests(ledger.kv_cache_bytes, resolved.input_tokens + resolved.output_tokens),
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            input_tokens=resolved.input_tokens,
            output_tokens=resolved.output_tokens,
            speculation=speculation,
        )
        if _itl_is_kept(resolved, prediction) or resolved.max_num_seqs_is_given or seqs == 1:
            break
        seqs = max(1, min(seqs, prediction.concurrent_sequences) // 2)
    return _with_replicas_and_cost(question, Outcome(candidate, None, tokens, seqs, ledger, prediction))


def _ledger(
    question: Question, candidate: Candidate, machine: Machine, draft: Machine | None, tokens: int, seqs: int
) -> MemoryLedger:
    """Return the memory ledger for steps of `tokens` tokens and `seqs` sequences."""
    resolved = question.resolved
    activations = activations_bytes(
        machine.shape,
        weight_format(machine.shape, machine.method),
        tensor=machine.tensor,
        max_num_batched_tokens=tokens,
        max_num_seqs=seqs,
        draft_tokens=question.speculation.max_draft_tokens,
        kv_cache=candidate.kv_cache,
        max_model_len=resolved.max_model_len,
    )
    return gpu_ledger(
        machine.part,
        resolved.gpu_memory_utilization_percent,
        machine.shape,
        machine.weights,
        activations,
        ranks=machine.tensor * machine.pipeline,
        draft=draft.weights if draft else None,
        correction=correction_for(question, candidate),
    )


def _kv_pool(question: Question, machine: Machine, draft: Machine | None, tokens: int, seqs: int) -> KvPool:
    """Return the KV pool for steps of `tokens` tokens. A draft model and stages share one block table."""
    is_divided = draft is not None or machine.pipeline > 1
    return kv_pool(
        machine.shape,
        machine.kv_bytes + (draft.kv_bytes if draft else 0),
        max_model_len=question.resolved.max_model_len,
        max_num_batched_tokens=tokens,
        max_num_seqs=seqs,
        is_grouped=question.is_grouped and not is_divided,
    )


def _with_replicas_and_cost(question: Question, outcome: Outcome) -> Outcome:
    """Check latency, load, GPUs for all replicas, and budget, in this order."""
    resolved, candidate, prediction = question.resolved, outcome.candidate, outcome.prediction
    assert prediction is not None  # noqa: S101 - the caller predicted
    replicas = _replicas(resolved, prediction)
    cost = cost_of(candidate.stock.part, candidate.gpus, replicas, prediction.tokens_per_second)
    problem = _latency_problem(resolved, prediction)
    free = candidate.stock.groups(candidate.tensor) // candidate.pipeline
    if problem is None and free < replicas and not question.inventory.hypothetical:
        stage = Stage.LOAD if resolved.has_load and replicas > resolved.replicas else Stage.INVENTORY
        problem = Problem(
            stage,
            f"{replicas} replicas need {replicas * candidate.gpus} {candidate.stock.part.name} in groups of "
            f"{candidate.tensor}; there is room for {free}",
            replicas - free,
        )
    # The placement is chosen for the load; the budget must pay for those of the spec, too.
    paid = max(replicas, resolved.replicas, resolved.fewest_autoscaled)
    usd = monthly_usd(candidate.stock.part.hourly_milli_usd * candidate.gpus, paid)
    if problem is None and resolved.budget_is_enforced and usd > (resolved.max_monthly_usd or 0):
        caveat = price_caveat(candidate.stock.part).removesuffix(".")
        lowest = f" for autoscaling.minReplicas {paid}" if paid > max(replicas, resolved.replicas) else ""
        words = f"costs ${usd:,} a month{lowest}, and budget.maxMonthlyUSD is {resolved.max_monthly_usd:,}"
        problem = Problem(Stage.BUDGET, f"{words}{f'.{caveat}' if caveat else ''}", usd)
    return replace(outcome, problem=problem, replicas=replicas, cost=cost)


def _speculation(plan: SpeculationPlan, draft: Machine | None) -> SpeculationSpeed | None:
    if plan.method == "Disabled":
        return None
    # EAGLE and Medusa are planned as a small draft, n-grams as a free one.
    acceptance = plan.assumed_acceptance_percent / 100
    return SpeculationSpeed(draft_tokens=plan.max_draft_tokens, acceptance=acceptance, draft=draft)


def _max_step_tokens(resolved: ResolvedSpec, machine: Machine) -> int:
    """Return the tokens per step, halved until a step with a full prefill chunk keeps the ITL objective."""
    tokens = resolved.max_num_batched_tokens
    if resolved.itl_milliseconds is None or resolved.max_num_batched_tokens_is_given:
        return tokens
    smallest = max(SHORTEST_STEP_TOKENS, resolved.max_num_seqs)
    limit_seconds = resolved.itl_milliseconds / 1000 / P95_MARGIN
    while tokens // 2 >= smallest and chunk_seconds(machine, tokens) > limit_seconds:
        tokens //= 2
    return tokens


def _memory_problem(resolved: ResolvedSpec, candidate: Candidate, ledger: MemoryLedger, need: int) -> Problem:
    requests = resolved.kv_floor_tokens // resolved.max_model_len
    left = max(0, ledger.kv_cache_bytes)
    what = f"{requests} × {resolved.max_model_len} tokens" if requests > 1 else f"{resolved.kv_floor_tokens} tokens"
    weights = ledger.weights_bytes + ledger.embeddings_bytes + ledger.draft_weights_bytes
    return Problem(
        Stage.MEMORY,
        f"{_gb(weights)} of weights leave {_gb(left)} of one {candidate.stock.part.name} for the KV cache; {what} need "
        f"{_gb(need)}: {_gb(need - ledger.kv_cache_bytes)} are missing",
        (need - ledger.kv_cache_bytes) / ledger.usable_bytes,
    )


def _itl_is_kept(resolved: ResolvedSpec, prediction: Prediction) -> bool:
    limit = resolved.itl_milliseconds
    return limit is None or prediction.itl_microseconds * P95_MARGIN <= limit * 1000


def _latency_problem(resolved: ResolvedSpec, prediction: Prediction) -> Problem | None:
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
    """Return enough replicas for the load, each busy to `LOAD_HEADROOM`; without a load, those of the spec."""
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
