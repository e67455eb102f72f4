"""Compare a candidate with its base, from two folders and a file to a report.

    read, tokenize, check ─► score the documents, layer by layer ─► figures by slice ─► verdicts ─► worst answers

Everything that can be refused is refused before the first weight is read. Memory holds one layer of one model at a
time, and for the worst answers one whole model, if it fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream_runtime.config import RuntimeConfig
from millstream_runtime.engine.host_limits import memory_limit_bytes, resident_bytes
from millstream_runtime.errors import FailureReason, InvalidConfigError, RuntimeFailure
from millstream_runtime.models.registry import load_model_config
from millstream_runtime.quality import report
from millstream_runtime.quality.documents import TokenizedDocument, documents_digest, read_documents_once, tokenize
from millstream_runtime.quality.judged_files import JudgedFile, judged_files, require_unchanged
from millstream_runtime.quality.scored_model import ScoredModel, with_max_model_len
from millstream_runtime.quality.slice_figures import by_slice
from millstream_runtime.quality.streamed_model import StreamedModel
from millstream_runtime.quality.streamed_scores import room_for, stream_scores
from millstream_runtime.quality.token_scores import DocumentScores
from millstream_runtime.quality.verdict import Workload, check_enough, judge
from millstream_runtime.tokenizing.tokenizer import Tokenizer

SHOWN_CHARACTERS = 1200  # of a prompt's end, an answer, a document
ANSWER_TOKENS = 96
NOT_GENERATED = "(not generated: memory has no room for the whole model)"


@dataclass(frozen=True, slots=True)
class ComparisonSettings:
    """What the user chose. `limits`: their own, by field of `verdict.Limits`; `workload` None: by the slice's name."""

    data: Path
    max_tokens: int
    max_documents: int
    num_worst: int
    seed: int
    workload: Workload | None
    limits: Mapping[str, float]


def compare(
    base: RuntimeConfig,
    candidate: RuntimeConfig,
    settings: ComparisonSettings,
    on_progress: Callable[[int, int], None],
) -> dict[str, Any]:
    """Return the document of `report.build`.

    Args:
        on_progress: `on_progress(done_tokens, all_tokens)` after each document.

    Raises:
        RuntimeFailure: bad data, tokenizers that differ, or a model that cannot be loaded; one sentence.
    """
    base, candidate = (with_max_model_len(one, settings.max_tokens) for one in (base, candidate))
    files = {one.model: judged_files(Path(one.model)) for one in (base, candidate)}
    documents, tokenizer, num_repeated = _documents(base, candidate, settings)
    digest = documents_digest(settings.data, "--data")  # it may be gone later
    data = report.JudgedData(str(settings.data), digest, num_repeated)
    models = StreamedModel(base), StreamedModel(candidate)
    room = room_for(*models, max(len(one.token_ids) for one in documents))
    try:
        scores = stream_scores(*models, documents, room, on_progress)
    except RuntimeFailure:
        _require_unchanged(files)  # what a loader says of files that were replaced names the effect, not the cause
        raise
    _require_unchanged(files)
    verdicts = [judge(one, settings.workload, settings.limits) for one in by_slice(scores, settings.seed)]
    worst = report.worst_documents(scores, settings.num_worst)
    answers = [
        _answers(one, model, [_prompt(each) for each in worst])
        for one, model in zip((base, candidate), models, strict=True)
    ]
    shown = [_shown(tokenizer, *each) for each in zip(worst, *answers, strict=True)]
    sides = [
        report.JudgedModel(one.model, model.bytes.whole, one.kv_cache_dtype.value, files[one.model])
        for one, model in zip((base, candidate), models, strict=True)
    ]
    return report.build(sides[0], sides[1], data, scores, verdicts, shown)


def _require_unchanged(files: Mapping[str, Sequence[JudgedFile]]) -> None:
    for folder, before in files.items():
        require_unchanged(Path(folder), before)


def _documents(
    base: RuntimeConfig, candidate: RuntimeConfig, settings: ComparisonSettings
) -> tuple[list[TokenizedDocument], Tokenizer, int]:
    documents, num_repeated = read_documents_once(settings.data, settings.max_documents)
    shapes = [load_model_config(Path(one.model)) for one in (base, candidate)]
    if shapes[0].vocab_size != shapes[1].vocab_size:
        raise InvalidConfigError(
            f"{candidate.model} has a vocabulary of {shapes[1].vocab_size} and {base.model} one of "
            f"{shapes[0].vocab_size}: they are not two forms of one model."
        )
    max_tokens = min(settings.max_tokens, *(one.max_model_len or settings.max_tokens for one in (base, candidate)))
    flag = "--max-tokens" if max_tokens == settings.max_tokens else None  # else the models take no more
    tokenizers = [Tokenizer.from_folder(Path(one.model)) for one in (base, candidate)]
    found = [tokenize(documents, one, shapes[0].eos_token_ids, max_tokens, flag) for one in tokenizers]
    for ours, theirs in zip(*found, strict=True):
        if ours != theirs:
            raise InvalidConfigError(
                f"Line {ours.line} becomes other tokens in {candidate.model} than in {base.model}: their tokenizers or "
                "chat templates differ. Copy tokenizer.json, tokenizer_config.json and chat_template.jinja of the base."
            )
    check_enough(found[0])
    return found[0], tokenizers[0], num_repeated


def _prompt(scores: DocumentScores) -> list[int]:
    """A text has no prompt: its first half asks for the second."""
    document = scores.document
    count = document.num_prompt_tokens if document.num_prompt_tokens > 1 else max(1, len(document.token_ids) // 2)
    return document.token_ids[:count]


def _answers(config: RuntimeConfig, streamed: StreamedModel, prompts: Sequence[list[int]]) -> list[list[int] | None]:
    """The greedy answer of each prompt; None where the whole model does not fit in memory."""
    on_cpu = streamed.device.type == "cpu"
    if not prompts or (on_cpu and streamed.bytes.whole > memory_limit_bytes() - resident_bytes()):
        return [None] * len(prompts)
    try:
        model = ScoredModel(config)
    except RuntimeFailure as failure:
        if failure.reason is not FailureReason.OUT_OF_MEMORY:
            raise
        return [None] * len(prompts)
    return [model.greedy(one, ANSWER_TOKENS) for one in prompts]


def _shown(
    tokenizer: Tokenizer, scores: DocumentScores, base: list[int] | None, candidate: list[int] | None
) -> report.WorstAnswer:
    document, prompt = scores.document, _prompt(scores)
    answers = [NOT_GENERATED if one is None else tokenizer.decode(one)[:SHOWN_CHARACTERS] for one in (base, candidate)]
    mean_kl = float(scores.kl.mean())
    return report.WorstAnswer(
        line=document.line,
        slice=document.slice,
        mean_kl=mean_kl if math.isfinite(mean_kl) else -1.0,
        prompt=tokenizer.decode(prompt)[-SHOWN_CHARACTERS:],
        expected=tokenizer.decode(document.token_ids[len(prompt) :])[:SHOWN_CHARACTERS],
        base=answers[0],
        candidate=answers[1],
    )
