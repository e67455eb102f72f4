"""The training of a draft: steps, the best one by watched documents, and checkpoints from which a run goes on.

    checkpoint ─► step, step, ... ─► watch ─► best weights, checkpoint ─► step ...

A step is AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) on the mean divergence of its sequences. Steps follow
from seed and number, and a checkpoint holds all that the next one needs: a run that was killed ends with the weights of
one that was not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from millstream_runtime.model_output.resumable_folder import ResumableFolder
from millstream_runtime.quantize.output.safetensors_file import tensors_of, write_file
from millstream_runtime.tune_draft.divergence import divergence
from millstream_runtime.tune_draft.step_batches import StepBatches, in_parts
from millstream_runtime.tune_draft.target_sequence import TargetSequence
from millstream_runtime.tune_draft.trainable_draft import TrainableDraft

BETAS, EPSILON, CLIP_NORM = (0.9, 0.99), 1e-8, 1.0
WARMUP_STEPS = 10
LAST_RATE = 0.05  # of the peak
LEARNING_RATE_BY_HIDDEN_SIZE = 0.25  # divided by the hidden size: 1e-3 for 256, 6e-5 for 4096
MAX_PART_TOKENS = 1024  # computed together
MAX_LOGITS_BYTES = 128 << 20  # of a part, in float32
NUM_WATCHES = 10
PATIENCE = 4  # watches without a better step, after which no better one is expected
MOST_LOSS_POINTS = 2.0  # of acceptance in a slice: a step that loses more is no candidate
CHECKPOINT_SECONDS = 60.0
MEASURED_STEPS = 3
NUM_PROGRESS = 4  # fields of `TrainingProgress`


@dataclass(frozen=True, slots=True)
class Recipe:
    """`rows`: sequences of a step. `learning_rate`: the peak, after a warm-up; then a line to LAST_RATE of it."""

    rows: int
    learning_rate: float
    seed: int

    def rate(self, step: int, steps: int) -> float:
        """Of a step, counted from 0."""
        warmup = min(WARMUP_STEPS, max(1, steps // 4))
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        return self.learning_rate * (1 - (1 - LAST_RATE) * (step - warmup) / max(1, steps - warmup))


@dataclass(slots=True)
class TrainingProgress:
    """`best_step` 0: the draft as it was; `best_percent`: its watched acceptance. `stale`: watches since then."""

    step: int = 0
    best_step: int = 0
    best_percent: float = 0.0
    stale: int = 0


class Training:
    """See the top of the file. `work` gets `checkpoint.safetensors` and `best.safetensors`."""

    def __init__(
        self,
        draft: TrainableDraft,
        sequences: Sequence[TargetSequence],
        watched: Sequence[TargetSequence],
        recipe: Recipe,
        work: ResumableFolder,
    ) -> None:
        self._draft, self._recipe, self._work = draft, recipe, work
        self._batches = StepBatches(sequences, recipe.rows, recipe.seed)
        self._watched = [one for one in watched if one.is_answer]
        self._checkpoint, self._best = work.path / "checkpoint.safetensors", work.path / "best.safetensors"
        self._optimizer = torch.optim.AdamW(
            draft.parameters.values(),
            lr=recipe.learning_rate,
            betas=BETAS,
            eps=EPSILON,
            weight_decay=0.0,
            foreach=False,
        )
        self._before = self._watch()
        self.progress = TrainingProgress(best_percent=self._before[None])
        self._resume()

    def step_seconds(self) -> float:
        """Measure what a step takes. Changes nothing."""
        began = time.monotonic()
        for number in range(MEASURED_STEPS):
            self._gradients(number)
        self._optimizer.zero_grad(set_to_none=True)
        return (time.monotonic() - began) / MEASURED_STEPS

    def run(self, steps: int, on_step: Callable[[int, int], None]) -> dict[str, Tensor]:
        """Return the weights of the best of `steps`, float32; empty where none is better than the draft was.

        `on_step`: gets the steps that are done, and all.
        """
        progress, saved = self.progress, time.monotonic()
        every = max(1, steps // NUM_WATCHES)
        while progress.step < steps and progress.stale < PATIENCE:
            on_step(progress.step, steps)
            self._gradients(progress.step)
            for group in self._optimizer.param_groups:
                group["lr"] = self._recipe.rate(progress.step, steps)
            self._optimizer.step()
            progress.step += 1
            is_watched = progress.step % every == 0 or progress.step == steps
            if is_watched:
                self._choose()
            if is_watched or time.monotonic() - saved > CHECKPOINT_SECONDS:
                saved = time.monotonic()
                self._save()
        on_step(steps, steps)
        return _load(self._best) if progress.best_step else {}

    def _gradients(self, number: int) -> None:
        """Of a step's mean divergence, in the parameters."""
        sequences = self._batches.of(number)
        positions = sum(one.num_positions for one in sequences)
        self._optimizer.zero_grad(set_to_none=True)
        for part in in_parts(sequences, self._part_tokens()):
            top_ids, top_logprobs = (
                torch.cat([getattr(one, name) for one in part]).to(self._draft.device)
                for name in ("top_ids", "top_logprobs")
            )
            loss = divergence(self._draft.logits(part), top_ids.long(), top_logprobs.float()) / positions
            loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._draft.parameters.values(), CLIP_NORM)

    def _part_tokens(self) -> int:
        return min(MAX_PART_TOKENS, max(1, MAX_LOGITS_BYTES // (4 * self._draft.vocab_size)))

    @torch.no_grad()
    def _watch(self) -> dict[str | None, float]:
        """Acceptance in percent by slice; under None of all answers but those to general prompts."""
        stood: dict[str | None, list[int]] = {}
        ordered = sorted(self._watched, key=lambda one: len(one.token_ids))
        for part in in_parts(ordered, self._part_tokens()):
            best, row = self._draft.logits(part).argmax(-1).cpu(), 0
            for one in part:
                count = int((best[row : row + one.num_positions] == one.token_ids[one.first :]).sum())
                row += one.num_positions
                for name in (one.slice, *(() if one.is_general else (None,))):
                    sums = stood.setdefault(name, [0, 0])
                    sums[0] += count
                    sums[1] += one.num_positions
        return {name: 100 * count / max(1, positions) for name, (count, positions) in stood.items()}

    def _choose(self) -> None:
        """Keep the weights if they are the best so far, and no slice has lost too much."""
        found, progress = self._watch(), self.progress
        loses = any(self._before[name] - percent > MOST_LOSS_POINTS for name, percent in found.items())
        if loses or found[None] <= progress.best_percent:
            progress.stale += 1
            return
        progress.best_step, progress.best_percent, progress.stale = progress.step, found[None], 0
        self._write(self._best, {name: one.detach() for name, one in self._draft.parameters.items()})

    def _save(self) -> None:
        tensors = {f"weight.{name}": one.detach() for name, one in self._draft.parameters.items()}
        for name, one in self._draft.parameters.items():
            state = self._optimizer.state[one]
            tensors |= {f"mean.{name}": state["exp_avg"], f"square.{name}": state["exp_avg_sq"]}
        reached = self.progress
        numbers = [reached.step, reached.best_step, reached.best_percent, reached.stale]
        self._write(self._checkpoint, tensors | {"progress": torch.tensor(numbers, dtype=torch.float64)})

    def _write(self, path: Path, tensors: dict[str, Tensor]) -> None:
        self._work.write(path, lambda partial: write_file(partial, tensors))

    def _resume(self) -> None:
        """Go on from the checkpoint, if there is one, with the best weights that it speaks of."""
        tensors = self._work.read(self._checkpoint, self._read_checkpoint)
        if tensors is None:
            return
        step, best_step, best_percent, stale = tensors["progress"].tolist()
        if best_step and self._work.read(self._best, self._read_best) is None:
            return
        self.progress = TrainingProgress(int(step), int(best_step), best_percent, int(stale))
        self._draft.load({name: tensors[f"weight.{name}"] for name in self._draft.parameters})
        for name, one in self._draft.parameters.items():
            self._optimizer.state[one] = {
                "step": torch.tensor(float(step)),
                "exp_avg": tensors[f"mean.{name}"].to(one.device),
                "exp_avg_sq": tensors[f"square.{name}"].to(one.device),
            }

    def _read_checkpoint(self, path: Path) -> dict[str, Tensor]:
        tensors = self._checked(_load(path), "weight.", "mean.", "square.")
        if tensors["progress"].shape != (NUM_PROGRESS,):
            raise ValueError("progress has another shape")
        return tensors

    def _read_best(self, path: Path) -> dict[str, Tensor]:
        return self._checked(_load(path), "")

    def _checked(self, tensors: dict[str, Tensor], *prefixes: str) -> dict[str, Tensor]:
        """Raises KeyError or ValueError: they are not those of this draft."""
        for name, parameter in self._draft.parameters.items():
            for prefix in prefixes:
                if tensors[f"{prefix}{name}"].shape != parameter.shape:
                    raise ValueError(f"{prefix}{name} has another shape")
        return tensors


def _load(path: Path) -> dict[str, Tensor]:
    return {name: one.load() for name, one in tensors_of(path).items()}
