"""Make defaults smaller where they alone keep a model from fitting. What the spec gives stays as it is. Pure.

the defaults -> a KV pool for one request of full length -> steps of 2,048 tokens and 90 % of the memory
             -> a shorter maxModelLen, as long as it can be, but never shorter than the usual request
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import replace

from millstream_operator.planning.choices.candidates import Question
from millstream_operator.planning.choices.outcome import Stage
from millstream_operator.planning.choices.placement import Choice, NoPlacement, choose_placement
from millstream_operator.planning.plan import PlanReason
from millstream_operator.planning.resolved_spec import ResolvedSpec
from millstream_operator.planning.tier_defaults import NEITHER

SHORTEST_DEFAULT_TOKENS = 1024
LENGTH_STEP_TOKENS = 256


def choose_with_defaults(question: Question, *, may_shorten: bool, explain: bool) -> Choice | NoPlacement:
    """Choose a placement with the defaults, and per product with smaller ones where it has none with these.

    So a cheap GPU that holds one request of full length is not passed over for a dear one that holds four.

    `may_shorten`: also shorten maxModelLen where no product holds the usual one. That is the last resort, because
    clients notice it: waiting for GPUs comes first.
    """
    of_products = [_that_fits(product) for product in _by_product(question)]
    choice = choose_placement(tuple(of_products) or (question,), explain=explain)
    if isinstance(choice, Choice):
        return choice
    return _choose_on_all_products(question, may_shorten=may_shorten, explain=explain)


def _by_product(question: Question) -> Iterator[Question]:
    """The same of one product each, without pipelines of the planner's own: those come after smaller defaults."""
    inventory = question.inventory
    for stock in inventory.stocks():
        yield replace(question, inventory=replace(inventory, kinds=stock.kinds), max_pipeline=1)


def _that_fits(question: Question) -> Question:
    """The question with the largest defaults that have a placement; with the smallest ones where none has."""
    choice = choose_placement((question,), explain=False)
    if isinstance(choice, Choice) or choice.problem.stage < Stage.MEMORY:
        return question
    gpus = question.inventory.kinds[0].part.name
    for smaller in _with_less_at_once(question.resolved, gpus):
        question = replace(question, resolved=smaller)
        if isinstance(choose_placement((question,), explain=False), Choice):
            break
    return question


def _choose_on_all_products(question: Question, *, may_shorten: bool, explain: bool) -> Choice | NoPlacement:
    """Choose with pipelines, then with smaller defaults, then with a shorter context.

    Where no defaults help, the problem is that of the smallest ones, because it names what is really missing.
    """

    def search(resolved: ResolvedSpec, explained: bool) -> Choice | NoPlacement:
        return choose_placement((replace(question, resolved=resolved),), explain=explained)

    resolved = question.resolved
    usual = search(resolved, explain)
    if isinstance(usual, Choice) or usual.problem.stage < Stage.MEMORY:
        return usual
    smallest = usual
    for smaller in _with_less_at_once(resolved, "GPUs"):
        choice = search(smaller, explain)
        if isinstance(choice, Choice):
            return choice
        resolved, smallest = smaller, choice
    lengths = list(_shorter(resolved)) if may_shorten else []
    if lengths:
        choice = search(lengths[-1], False)
        if isinstance(choice, Choice):
            longest = bisect.bisect_left(lengths[:-1], True, key=lambda one: isinstance(search(one, False), Choice))
            return search(lengths[longest], explain)
        smallest = choice
    return replace(usual, problem=smallest.problem) if smallest.problem.stage >= usual.problem.stage else usual


def _with_less_at_once(resolved: ResolvedSpec, gpus: str) -> Iterator[ResolvedSpec]:
    """Yield one request in the KV pool, then smaller steps too: clients notice neither in what they may send.

    `gpus`: on which the larger defaults fit nowhere, for the reason.
    """
    requests, length = min(resolved.kv_pool_requests, resolved.max_num_seqs), resolved.max_model_len
    if requests > 1 and resolved.tensor is None:
        why = f"The KV pool holds one request of {length:,} tokens or more; {requests}, the default, fit on no {gpus}."
        pool = PlanReason("memory", why)
        resolved = replace(resolved, kv_pool_requests=1, reasons=(*resolved.reasons, pool))
        yield resolved
    smaller = _with_smaller_steps(resolved, gpus)
    if smaller != resolved:
        yield smaller


def _with_smaller_steps(resolved: ResolvedSpec, gpus: str) -> ResolvedSpec:
    """The batching defaults of a spec without tier and profile, where they take less memory."""
    seqs, tokens = resolved.max_num_seqs, resolved.max_num_batched_tokens
    percent = resolved.gpu_memory_utilization_percent
    if not resolved.max_num_seqs_is_given:
        seqs = min(seqs, NEITHER.max_num_seqs)
    if not resolved.max_num_batched_tokens_is_given:
        tokens = min(tokens, max(NEITHER.max_num_batched_tokens, seqs))
    if not resolved.utilization_is_given:
        percent = max(percent, NEITHER.gpu_memory_utilization_percent)
    changed = (
        ("engine.maxNumSeqs", resolved.max_num_seqs, seqs),
        ("engine.maxNumBatchedTokens", resolved.max_num_batched_tokens, tokens),
        ("engine.gpuMemoryUtilizationPercent", resolved.gpu_memory_utilization_percent, percent),
    )
    for field, before, now in changed:
        resolved = _because_it_fits(resolved, field, before, now, gpus)
    return replace(resolved, max_num_seqs=seqs, max_num_batched_tokens=tokens, gpu_memory_utilization_percent=percent)


def _shorter(resolved: ResolvedSpec) -> Iterator[ResolvedSpec]:
    """Yield shorter defaults of maxModelLen, the longest first; the usual request always has room."""
    if resolved.max_model_len_is_given:
        return
    shortest = max(SHORTEST_DEFAULT_TOKENS, resolved.input_tokens + resolved.output_tokens)
    longest = (resolved.max_model_len - 1) // LENGTH_STEP_TOKENS * LENGTH_STEP_TOKENS
    for length in range(longest, shortest - 1, -LENGTH_STEP_TOKENS):
        shorter = _because_it_fits(resolved, "engine.maxModelLen", resolved.max_model_len, length, "GPUs")
        others = tuple(reason for reason in shorter.reasons if reason.field != "memory")
        yield replace(shorter, max_model_len=length, reasons=others)


def _because_it_fits(resolved: ResolvedSpec, field: str, before: int, now: int, gpus: str) -> ResolvedSpec:
    """The same with the reason for a smaller default; unchanged where the default is the same."""
    if before == now:
        return resolved
    why = PlanReason(field, f"{now:,} instead of {before:,}, the default, with which the model fits on no {gpus}.")
    return replace(resolved, reasons=tuple(why if one.field == field else one for one in resolved.reasons))
