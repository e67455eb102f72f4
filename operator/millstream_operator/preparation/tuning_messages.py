"""What the status and the journal say about the tuning of a draft. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.optimization import Dataset
from millstream_operator.diagnosis.conditions import DRAFT_TUNED, Condition
from millstream_operator.diagnosis.decisions import Decision, DecisionType
from millstream_operator.diagnosis.diagnosis import Diagnosis, sentence
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.facts.job_attempts import JobWork
from millstream_operator.planning.model_path import tuned_path
from millstream_operator.planning.requires import draft_source, tuning_of
from millstream_operator.preparation.step_answers import acceptance_in_words, is_better, read_step_answer
from millstream_operator.preparation.step_messages import MEMORY_FIX, since
from millstream_operator.rendering.inspect_job import Subject
from millstream_operator.rendering.preparation_job import Step

Manifest = dict[str, Any]
WHAT = "Tuning the draft"
DRAFT_SERVES = "The draft that serves goes on serving."
TRY_AGAIN = "Change speculation.tuning to try again: other or more prompts under another name, or more steps."


def waiting() -> Condition:
    """Before the Job: there are no pods yet whose models it could take."""
    return Condition(DRAFT_TUNED, False, Reason.TUNING_DRAFT, "It begins once the model has answered.")


def work_of(owner: LLMDeployment, step: Step, jobs: Sequence[Manifest]) -> JobWork:
    """Return what the Jobs do, in the words of the status."""
    return JobWork(
        container=step.kind.container,
        what=WHAT,
        under_way=Diagnosis(Reason.TUNING_DRAFT, f"{_doing(owner)}{since(jobs)}.", DRAFT_SERVES),
        failure=Reason.PREPARATION_FAILED,
        read=lambda message: read_step_answer(step.kind, message),
        exit_codes=frozenset({0, 3}),  # 3: made, and not better
        memory_fix=MEMORY_FIX,
    )


def under_way(owner: LLMDeployment, problem: Diagnosis) -> Condition:
    """Which Job tunes, or why the last one failed."""
    if problem.reason is Reason.TUNING_DRAFT:
        return Condition(DRAFT_TUNED, False, problem.reason, problem.message)
    hint = problem.hint
    if not hint and problem.reason is Reason.INVALID_CONFIG:
        hint = f"Mend what it names; {_documents(owner)}."
    begins = problem.detail.startswith(WHAT)
    detail = problem.detail if begins else f"{WHAT} failed: {problem.detail}"
    message = Diagnosis(problem.reason, sentence(detail), f"{hint} {DRAFT_SERVES}".strip()).message
    return Condition(DRAFT_TUNED, False, problem.reason, message)


def decided(answer: Mapping[str, Any]) -> Condition:
    """Whether pods load the tuned draft, with the figures."""
    figures = acceptance_in_words(answer)
    if is_better(answer):
        message = sentence(f"More drafts stand on held-out prompts, so pods load the tuned draft: {figures}")
        return Condition(DRAFT_TUNED, True, Reason.DRAFT_TUNED, message)
    message = f"{sentence(f'{_not_better(answer)}: {figures}')} {TRY_AGAIN}"
    return Condition(DRAFT_TUNED, False, Reason.DRAFT_NOT_BETTER, message)


def started(owner: LLMDeployment, step: Step) -> Decision:
    """The journal's entry for a tuning that begins."""
    detail = f"{_doing(owner)} into {tuned_path(step.key)} of model.cache; {DRAFT_SERVES[:1].lower()}{DRAFT_SERVES[1:]}"
    return Decision(DecisionType.DRAFT_TUNING_STARTED, detail)


def outcome(answer: Mapping[str, Any], step: Step) -> Decision:
    """The journal's entry for a draft that was tuned, and judged."""
    figures = acceptance_in_words(answer)
    if is_better(answer):
        detail = sentence(f"{tuned_path(step.key)} replaces the draft: {figures}")
        return Decision(DecisionType.TUNED_DRAFT_PROMOTED, detail)
    detail = sentence(f"{tuned_path(step.key)} does not replace the draft. {_not_better(answer)}: {figures}")
    return Decision(DecisionType.TUNED_DRAFT_REFUSED, detail)


def _not_better(answer: Mapping[str, Any]) -> str:
    reasons = "; ".join(str(one) for one in answer.get("reasons") or ())
    return f"The tuned draft is not better, and does not serve ({reasons})"


def _doing(owner: LLMDeployment) -> str:
    draft = draft_source(owner.spec)
    named = f" {Subject(draft)}" if draft is not None else ""
    return f"{WHAT}{named} on the answers of {Subject(owner.spec.model.source)}"


def _documents(owner: LLMDeployment) -> str:
    """Where the prompts are, in the words of the spec."""
    tuning = tuning_of(owner.spec)
    given: dict[str, Dataset | None] = (
        {"dataset": tuning.dataset, "generalDataset": tuning.general_dataset} if tuning is not None else {}
    )
    words = []
    for field, dataset in given.items():
        if dataset is None:
            continue
        if (named := dataset.config_map_ref) is not None:
            words.append(f"key {named.key} of ConfigMap {named.name} (speculation.tuning.{field})")
        else:
            words.append(f"the file of speculation.tuning.{field}.persistentVolumeClaim")
    return f"the documents are {' and '.join(words)}"
