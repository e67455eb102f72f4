"""Tune a draft: from target, draft and the user's prompts to a folder that is served as the draft.

    refuse ─► split ─► target answers ─► train the draft on them ─► judge before and after ─► rename

Target and draft are never in memory together. What is done is on disk: a run that was killed goes on from its last
file of answers or its last checkpoint, and gives the same bytes as one that was not. The output folder appears whole,
in one rename.
"""

from __future__ import annotations

import gc
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from millstream_runtime.config import Device, DType, RuntimeConfig
from millstream_runtime.engine.host_limits import memory_limit_bytes, resident_bytes
from millstream_runtime.errors import FailureReason, InvalidConfigError, RuntimeFailure
from millstream_runtime.job_memory.draft_tuning import MAX_TRAINING_POSITIONS, PARAMETER_BYTES, SCRATCH_BYTES, TOP
from millstream_runtime.model_output.companion_files import companions_digest, copy_companions
from millstream_runtime.model_output.resumable_folder import ResumableFolder, reading, require_free
from millstream_runtime.model_output.unchanged_sources import UnchangedSources
from millstream_runtime.models.config.model_config import ModelConfig
from millstream_runtime.models.loading.checkpoint_digest import checkpoint_digest
from millstream_runtime.models.registry import expected_weights, load_model_config
from millstream_runtime.quality.documents import documents_digest
from millstream_runtime.quality.scored_model import ScoredModel
from millstream_runtime.quantize.output.safetensors_file import TORCH_DTYPES, write_file
from millstream_runtime.quantize.source_model import SourceModel
from millstream_runtime.tokenizing.tokenizer import Tokenizer
from millstream_runtime.tune_draft.acceptance import Stands
from millstream_runtime.tune_draft.answer_shards import AnswerShards
from millstream_runtime.tune_draft.documents import TuningPrompts, read_prompts
from millstream_runtime.tune_draft.refused_draft import RefusedDraft
from millstream_runtime.tune_draft.run_plan import RunPlan
from millstream_runtime.tune_draft.settings import REPORT_NAME, TuneSettings
from millstream_runtime.tune_draft.target_answers import TargetModel
from millstream_runtime.tune_draft.target_sequence import TargetSequence
from millstream_runtime.tune_draft.trainable_draft import TrainableDraft
from millstream_runtime.tune_draft.training import LEARNING_RATE_BY_HIDDEN_SIZE, Recipe, Training
from millstream_runtime.tune_draft.tuning_report import BETTER, card, report

JOB_VERSION = 2  # changes when the same job gives other bytes
CARD_NAME = "README.md"
SEQUENCE_PASSES, MOST_PASSES = 3, 10  # how often training sees a sequence: by default, and at most with --minutes
MAX_STEPS = 5000
OnProgress = Callable[[str, float, float], None]  # stage, done, all


@dataclass(frozen=True, slots=True)
class TunedDraft:
    """`report`: of `tuning_report.report`. `is_made`: there is a folder, which `only_better` may leave out."""

    folder: Path
    is_made: bool
    num_duplicates: int
    num_cut: int
    report: dict[str, Any]


def tune(settings: TuneSettings, say: Callable[[str], None], on_progress: OnProgress) -> TunedDraft | None:
    """Make `settings.out`, or go on where an earlier run stopped. None: another process made it, and it is kept.

    Args:
        say: shows one sentence.
        on_progress: called with the stage, and how much of it is done.

    Raises:
        RuntimeFailure: a model, the data or the output folder cannot be used, or the disk is full; one sentence.
    """
    require_free(settings.out)
    source, target = SourceModel.open(settings.draft), load_model_config(settings.target)
    unchanged = UnchangedSources((settings.target, settings.draft), partial(checkpoint_digest, with_times=False))
    _check_pair(settings, source, target)
    sequence_tokens = min(settings.sequence_tokens, source.config.max_model_len - 1, target.max_model_len - 1)
    if settings.answer_tokens >= sequence_tokens:
        raise InvalidConfigError(
            f"--max-answer-tokens is {settings.answer_tokens}, and prompt and answer together have {sequence_tokens} "
            "(--sequence-tokens, or what the models take): give a smaller one."
        )
    tokenizers = [Tokenizer.from_folder(one) for one in (settings.target, settings.draft)]
    prompts = read_prompts(settings, tokenizers, target.eos_token_ids, sequence_tokens)
    work = ResumableFolder(settings.out, "tune-draft")
    with work.locked(say), reading(work.path):
        if settings.keeps_what_is_there():
            return None
        require_free(settings.out)  # another process may have made it meanwhile
        work.open(_job(settings), say, discard_other=settings.discard_other_work)
        refused = RefusedDraft(work)
        found = refused.report() if settings.only_better else None
        if found is None:
            work.require_space(_disk_bytes(source, prompts, sequence_tokens))
            found = _Run(settings, source, prompts, work, sequence_tokens, say, on_progress).make()
            unchanged.require()
        is_made = found["verdict"] == BETTER or not settings.only_better
        if is_made:
            work.finish()
        else:
            refused.keep(found)
    return TunedDraft(settings.out, is_made, prompts.num_duplicates, prompts.num_cut, found)


class _Run:
    """The stages of one run, in a work folder that is open."""

    def __init__(
        self, settings: TuneSettings, source: SourceModel, prompts: TuningPrompts, work: ResumableFolder,
        sequence_tokens: int, say: Callable[[str], None], on_progress: OnProgress,
    ) -> None:  # fmt: skip
        self._settings, self._source, self._work = settings, source, work
        self._sequence_tokens, self._say, self._on_progress = sequence_tokens, say, on_progress
        self._plan = RunPlan(work, settings.minutes)
        self._target: TargetModel | None = None
        order = random.Random(settings.seed)  # noqa: S311 - reproducible, not secret
        training = order.sample(prompts.training, len(prompts.training))  # a run that stops early has some of all
        self._parts = {
            name: AnswerShards(work, name, part, self._loaded_target, settings.temperature, settings.seed)
            for name, part in (("judged", prompts.judged), ("watched", prompts.watched), ("training", training))
        }

    def make(self) -> dict[str, Any]:
        """Write the model; return the report."""
        sequences = self._answers()
        if self._target is not None:
            self._target.close()
            self._target = None
            gc.collect()
        best, steps = self._train(sequences["training"], sequences["watched"])
        self._write_model(best)
        stands = self._judge(sequences["judged"])
        settings = self._settings
        described = {"target": settings.target.name, "draft": settings.draft.name, "steps": steps} | {
            name: value
            for name, value in asdict(settings).items()
            if name in ("rows", "temperature", "answer_tokens", "sequence_tokens", "seed")
        }
        described |= {"learning_rate": self._learning_rate(), "training_sequences": len(sequences["training"])}
        found = report(stands, settings.draft_tokens, settings.seed, described)
        self._work.write_text(self._work.model / REPORT_NAME, json.dumps(found, indent=2, ensure_ascii=False) + "\n")
        text = card(settings.out.name, settings.draft.name, settings.target.name, found)
        self._work.write_text(self._work.model / CARD_NAME, text)
        return found

    def _loaded_target(self) -> TargetModel:
        if self._target is None:
            one = self._settings
            self._target = TargetModel(
                one.target, one.device, self._sequence_tokens, one.answer_tokens, one.temperature
            )
        return self._target

    def _answers(self) -> dict[str, list[TargetSequence]]:
        """Make what is missing. Of the training's files as many as the time and the memory allow."""
        sequences: dict[str, list[TargetSequence]] = {name: [] for name in self._parts}
        total, done = sum(one.count for one in self._parts.values()), 0
        for name, shards in self._parts.items():
            positions = 0
            for number in range(shards.count):
                if name == "training" and number and self._is_enough(number, positions):
                    break
                found = shards.read(number)
                if found is None:
                    self._on_progress("answers", done, total)
                    found = shards.make(number)
                    self._plan.save()
                self._check_vocabulary(found)
                sequences[name] += found
                positions += sum(one.num_positions for one in found)
                done += 1
            if name == "training" and self._plan.decided.num_shards is None:
                self._plan.decided.num_shards = done - self._parts["judged"].count - self._parts["watched"].count
                self._plan.save()
        self._on_progress("answers", total, total)
        return sequences

    def _is_enough(self, number: int, positions: int) -> bool:
        decided = self._plan.decided.num_shards
        if decided is not None:
            return number >= decided
        return positions >= MAX_TRAINING_POSITIONS or not self._plan.may_answer_more()

    def _check_vocabulary(self, sequences: Sequence[TargetSequence]) -> None:
        largest = max(int(one.token_ids.max()) for one in sequences)
        if largest >= self._source.config.vocab_size:
            raise InvalidConfigError(
                f"The target writes token {largest}, and {self._settings.draft} has a vocabulary of "
                f"{self._source.config.vocab_size}: they are not a pair."
            )

    def _train(self, sequences: list[TargetSequence], watched: list[TargetSequence]) -> tuple[dict[str, Tensor], int]:
        """Return the best weights by name, empty for those of the draft as it is, and the step that they are of."""
        device = _device(self._settings)
        draft = TrainableDraft(self._source, device)
        draft.require_equal(self._scored(self._settings.draft), sequences[0])
        torch.use_deterministic_algorithms(True, warn_only=device.type != "cpu")
        try:
            recipe = Recipe(self._settings.rows, self._learning_rate(), self._settings.seed)
            training = Training(draft, sequences, watched, recipe, self._work)
            if training.progress.step:
                self._say(f"going on after step {training.progress.step}")
            steps = self._steps(training, len(sequences))
            best = training.run(steps, lambda done, all_steps: self._on_progress("training", done, all_steps))
        finally:
            torch.use_deterministic_algorithms(False)
        return best, training.progress.best_step

    def _steps(self, training: Training, num_sequences: int) -> int:
        """Decided once, and kept."""
        decided, settings = self._plan.decided, self._settings
        if decided.steps is None:
            within = self._plan.steps_within(training.step_seconds)
            passes = SEQUENCE_PASSES if within is None else MOST_PASSES
            most = min(MAX_STEPS, math.ceil(passes * num_sequences / settings.rows))
            decided.steps = settings.steps or (most if within is None else min(most, within))
            self._plan.save()
        return decided.steps

    def _learning_rate(self) -> float:
        asked = self._settings.learning_rate
        return asked if asked is not None else LEARNING_RATE_BY_HIDDEN_SIZE / self._source.config.hidden_size

    def _write_model(self, best: dict[str, Tensor]) -> None:
        """The draft's own tensors in its own types, with the values of `best` where there are some."""
        stored = self._source.tensors
        tensors = {name: best[name].to(TORCH_DTYPES[one.dtype]) if best else one for name, one in stored.items()}
        self._work.write(self._work.model / "model.safetensors", lambda path: write_file(path, tensors))
        text = json.dumps(self._source.values, indent=2, ensure_ascii=False) + "\n"
        self._work.write_text(self._work.model / "config.json", text)
        copy_companions(self._source.folder, self._work)

    def _judge(self, judged: list[TargetSequence]) -> list[Stands]:
        """As served: by the runtime, from the folders."""
        found = []
        models = [self._scored(folder) for folder in (self._settings.draft, self._work.model)]
        for number, one in enumerate(judged):
            self._on_progress("judge", number, len(judged))
            before, after = (_stands(model, one) for model in models)
            found.append(Stands(one.slice, one.is_general, one.is_answer, before, after))
        self._on_progress("judge", len(judged), len(judged))
        return found

    def _scored(self, folder: Path) -> ScoredModel:
        """On a CPU in float32, as it is trained: rounded products would hide what training changes."""
        device = Device(self._settings.device)
        return ScoredModel(
            RuntimeConfig(
                model=str(folder),
                served_model_name="draft",
                device=device,
                dtype=DType.FLOAT32 if device is Device.CPU else DType.AUTO,
                max_model_len=self._sequence_tokens + 1,
                enable_prefix_caching=False,
            )
        )


def _stands(model: ScoredModel, sequence: TargetSequence) -> np.ndarray:
    """Whether the model's most probable token is that of the sequence, bool `[positions]`."""
    best = torch.cat([one.logits.argmax(-1).cpu() for one in model.logits(sequence.token_ids.tolist(), sequence.first)])
    stands: np.ndarray = (best == sequence.token_ids[sequence.first :]).numpy()
    return stands


def _check_pair(settings: TuneSettings, source: SourceModel, target: ModelConfig) -> None:
    """Raises InvalidConfigError: the draft is the target, or larger. On a CPU: RuntimeFailure, it is too large."""
    if settings.target.samefile(settings.draft):
        raise InvalidConfigError(
            f"TARGET and DRAFT are both {settings.draft}: a draft must be a smaller model with the target's tokenizer."
        )
    sizes = [expected_weights(one, torch.float32).num_bytes for one in (source.config, target)]
    if sizes[0] > sizes[1]:
        raise InvalidConfigError(
            f"The draft {settings.draft} has {sizes[0] / sizes[1]:.1f} times the weights of the target "
            f"{settings.target}: a draft must be smaller. Are the two in the wrong order?"
        )
    needed_bytes = sizes[0] // 4 * PARAMETER_BYTES + SCRATCH_BYTES
    usable_bytes = memory_limit_bytes() - resident_bytes()
    if _device(settings).type == "cpu" and needed_bytes > usable_bytes:
        raise RuntimeFailure(
            FailureReason.OUT_OF_MEMORY,
            f"Training {settings.draft} needs {needed_bytes / 1e9:.2f} GB of memory, and {usable_bytes / 1e9:.2f} GB "
            "are usable: tune it on a machine with more memory, or take a smaller draft.",
        )


def _device(settings: TuneSettings) -> torch.device:
    """Raises InvalidConfigError: there is no such device."""
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise InvalidConfigError("--device cuda, but torch finds no CUDA device; use --device cpu.")
    on_cuda = settings.device != "cpu" and torch.cuda.is_available()
    return torch.device("cuda" if on_cuda else "cpu")


def _job(settings: TuneSettings) -> dict[str, Any]:
    """Everything that the bytes of the result follow from."""
    values = asdict(settings)
    files = {name: values.pop(name) for name in ("data", "general", "held_out")}
    tokenizers = {f"tokenizer_of_{name}": companions_digest(values[name]) for name in ("target", "draft")}
    models = tokenizers | {name: checkpoint_digest(values.pop(name)).hex() for name in ("target", "draft")}
    del values["out"], values["keep_made"], values["discard_other_work"], values["only_better"]
    digests = {
        name: None if one is None else documents_digest(one, f"--{name.replace('_', '-')}")
        for name, one in files.items()
    }
    return {"version": JOB_VERSION} | models | digests | values | {"device": _device(settings).type}


def _disk_bytes(source: SourceModel, prompts: TuningPrompts, sequence_tokens: int) -> int:
    """Of the answers at most, of a checkpoint, the best weights and one more of each while it is replaced."""
    num_prompts = len(prompts.training) + len(prompts.watched) + len(prompts.judged)
    positions = min(MAX_TRAINING_POSITIONS, 3 * num_prompts * sequence_tokens)
    weights_bytes = expected_weights(source.config, torch.float32).num_bytes
    return positions * 6 * TOP + (2 * 3 + 2 + 1) * weights_bytes
