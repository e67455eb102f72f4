"""Choose a placement: per product the fewest GPUs per replica, and of the products the cheapest.

outcomes -> Choice(best, rejected) | NoPlacement(problem, rejected): the others are rejected, each with a reason.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from millstream_operator.planning.choices.candidates import Candidate, Question, candidates
from millstream_operator.planning.choices.evaluation import evaluate
from millstream_operator.planning.choices.outcome import Outcome, Problem, Stage
from millstream_operator.planning.choices.placement_reasons import itl_text
from millstream_operator.planning.plan import MAX_REJECTED, Rejected
from millstream_operator.planning.resolved_spec import ResolvedSpec

MAX_KNOWN = 256  # choices that are remembered, some kilobytes each


@dataclass(frozen=True, slots=True)
class Choice:
    """`resolved`: the spec with the defaults that it was made with."""

    best: Outcome
    resolved: ResolvedSpec
    rejected: tuple[Rejected, ...]


@dataclass(frozen=True, slots=True)
class NoPlacement:
    """No placement is feasible; `problem` is that of the one that came nearest."""

    problem: Problem
    nearest: Outcome | None
    rejected: tuple[Rejected, ...]


@functools.lru_cache(maxsize=MAX_KNOWN)
def choose_placement(questions: tuple[Question, ...], *, explain: bool = True) -> Choice | NoPlacement:
    """Return the best placement of questions that differ in products and in how far defaults shrink for these.

    Without `explain` the others get no reasons, and evaluation stops at the fewest GPUs of a product that are feasible:
    enough to prove a fix. Pure and cached: a thousand deployments of one model on one cluster are one question.
    """
    if (problem := questions[0].formats.problem) is not None:
        return NoPlacement(Problem(Stage.QUANTIZATION, problem), None, ())
    evaluated = [(question, _evaluate(question, explain=explain)) for question in questions]
    outcomes = [outcome for _, some in evaluated for outcome in some]
    best_of_products = [(best, question) for question, some in evaluated for best in _best_of_products(some)]
    if best_of_products:
        best, question = min(best_of_products, key=lambda one: _order_of_products(one[0]))
        return Choice(best, question.resolved, _rejected(outcomes, best) if explain else ())
    if not outcomes:
        return NoPlacement(_nothing_to_plan_on(questions[0]), None, ())
    nearest = min(outcomes, key=_distance)
    assert nearest.problem is not None  # noqa: S101 - none is feasible
    return NoPlacement(nearest.problem, nearest, _rejected(outcomes, None) if explain else ())


def _evaluate(question: Question, *, explain: bool) -> list[Outcome]:
    """Evaluate pipelines only when no placement of one stage holds the model."""
    evaluate_some = _evaluate_all if explain else _evaluate_fewest_gpus
    outcomes = evaluate_some(question, candidates(question, pipelines=False))
    may_pipeline = question.resolved.pipeline is None and not question.resolved.one_gpu
    if may_pipeline and not any(map(_fits, outcomes)):
        outcomes += evaluate_some(question, candidates(question, pipelines=True))
    return outcomes


def _evaluate_all(question: Question, placements: Iterable[Candidate]) -> list[Outcome]:
    return list(evaluate(question, placements))


def _evaluate_fewest_gpus(question: Question, placements: Iterable[Candidate]) -> list[Outcome]:
    """Evaluate each product in the order of GPUs, up to the first number that is feasible: it takes no larger one."""
    evaluated: list[Outcome] = []
    for _, of_product in itertools.groupby(sorted(placements, key=_product_and_gpus), key=_product):
        for _, as_many in itertools.groupby(of_product, key=_product_and_gpus):
            outcomes = list(evaluate(question, as_many))
            evaluated += outcomes
            if any(outcome.problem is None for outcome in outcomes):
                break
    return evaluated


def _product(candidate: Candidate) -> str:
    return candidate.stock.part.name


def _product_and_gpus(candidate: Candidate) -> tuple[str, int]:
    return candidate.stock.part.name, candidate.gpus


def _fits(outcome: Outcome) -> bool:
    """Return whether the model fits in memory. Pipeline stages would not solve any later problem."""
    return outcome.problem is None or outcome.problem.stage > Stage.MEMORY


def _best_of_products(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """The feasible outcome of each product with the fewest GPUs per replica: more of them exceed what is asked."""
    best: dict[str, Outcome] = {}
    for outcome in outcomes:
        if outcome.problem is None:
            name = outcome.candidate.stock.part.name
            best[name] = min(best.get(name, outcome), outcome, key=_order)
    return list(best.values())


def _order(outcome: Outcome) -> tuple[Any, ...]:
    """The objective within a product. The last terms only make equals come out the same every time."""
    cost, prediction, candidate = outcome.cost, outcome.prediction, outcome.candidate
    assert cost is not None  # noqa: S101 - feasible
    assert prediction is not None  # noqa: S101
    return (
        candidate.gpus,
        cost.monthly_usd,
        candidate.pipeline,
        candidate.method != "None",
        -prediction.tokens_per_second,
        candidate.stock.part.name,
    )


def _order_of_products(outcome: Outcome) -> tuple[Any, ...]:
    """The objective among products: the cheapest of those that meet what is asked."""
    assert outcome.cost is not None  # noqa: S101 - feasible
    return (outcome.cost.monthly_usd, *_order(outcome))


def _distance(outcome: Outcome) -> tuple[Any, ...]:
    problem = outcome.problem
    assert problem is not None  # noqa: S101 - the caller looks at infeasible ones
    return (-problem.stage, problem.shortfall, outcome.candidate.gpus, outcome.candidate.stock.part.name)


def _rejected(outcomes: Sequence[Outcome], best: Outcome | None) -> tuple[Rejected, ...]:
    """One line for each distinct placement, nearest first: the feasible ones, then the others.

    Sizes of one product whose memory is exceeded without any KV cache are one line together.
    """
    found: dict[str, tuple[tuple[Any, ...], Outcome]] = {}
    hopeless: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        summary = outcome.candidate.summary
        if best is not None and (outcome is best or summary == best.candidate.summary):
            continue
        if _is_hopeless(outcome):
            summary = f"{outcome.candidate.stock.part.name} {outcome.candidate.weights}"
            hopeless.setdefault(summary, []).append(outcome)
        rank = (0, *_order(outcome)) if outcome.problem is None else (1, *_distance(outcome))
        known = found.get(summary)
        if known is None or rank < known[0]:
            found[summary] = rank, outcome
    nearest = heapq.nsmallest(MAX_REJECTED, found.items(), key=lambda item: item[1][0])
    return tuple(
        _hopeless_line(hopeless[summary])
        if len(hopeless.get(summary, ())) > 1
        else _line(outcome, outcome.candidate.summary, _against(outcome, best))
        for summary, (_, outcome) in nearest
    )


def _is_hopeless(outcome: Outcome) -> bool:
    """Whether the weights and buffers alone exceed the memory, so that no shorter context would help."""
    problem, ledger = outcome.problem, outcome.ledger
    return problem is not None and problem.stage is Stage.MEMORY and ledger is not None and ledger.kv_cache_bytes < 0


def _hopeless_line(outcomes: Sequence[Outcome]) -> Rejected:
    """Several sizes of one product in one line; what is missing is that of the size that lacks least."""
    nearest = min(outcomes, key=_distance)
    assert nearest.problem is not None  # noqa: S101 - hopeless ones have a problem
    candidate = nearest.candidate
    *others, last = sorted({outcome.candidate.gpus for outcome in outcomes})
    counts = f"{', '.join(map(str, others))} or {last}" if others else str(last)
    reason = f"As {candidate.summary}: {nearest.problem.sentence}."
    return Rejected(f"{counts}×{candidate.stock.part.name} {candidate.weights}", reason, candidate.gpus)


def _against(outcome: Outcome, best: Outcome | None) -> str:
    if outcome.problem is not None:
        return f"{outcome.problem.sentence}."
    assert best is not None  # noqa: S101 - it is feasible, so there is a best
    return _worse(outcome, best)


def _line(outcome: Outcome, summary: str, reason: str) -> Rejected:
    prediction, cost = outcome.prediction, outcome.cost
    return Rejected(
        summary,
        reason,
        outcome.candidate.gpus,
        cost.monthly_usd if cost else None,
        prediction.ttft_milliseconds if prediction else None,
        prediction.itl_microseconds if prediction else None,
    )


def _worse(outcome: Outcome, best: Outcome) -> str:
    """Why a feasible placement is not the choice, with the predicted ITL of both."""
    itl = f"predicted ITL {itl_text(outcome)}, the choice's {itl_text(best)}"
    if outcome.candidate.gpus > best.candidate.gpus:
        return f"{outcome.candidate.gpus} GPUs a replica where {best.candidate.gpus} do; {itl}."
    assert outcome.cost is not None  # noqa: S101 - both are feasible
    assert best.cost is not None  # noqa: S101
    if outcome.cost.monthly_usd > best.cost.monthly_usd:
        return f"Costs ${outcome.cost.monthly_usd:,} a month where ${best.cost.monthly_usd:,} do; {itl}."
    return f"No better than the choice, and less accurate or slower; {itl}."


def _nothing_to_plan_on(question: Question) -> Problem:
    resolved = question.resolved
    if question.inventory.kinds:
        groups = f"{resolved.tensor or 1} × {resolved.pipeline or 1}"
        return Problem(
            Stage.PARALLELISM, f"parallelism asks for {groups} GPUs, and there are only {question.inventory}"
        )
    if resolved.products:
        return Problem(Stage.PRODUCTS, f"no free GPU is one of accelerator.products ({', '.join(resolved.products)})")
    return Problem(Stage.INVENTORY, "there is no free GPU")
