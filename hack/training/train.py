"""The training loop: small batches summed to one step, checkpoints, a progress bar with held-out figures.

Two workers compute small batches side by side, each with one thread: they wait for each other once per step, not at
each operation, which costs several times as much where other programs use the cores. The same seed and processor give
the same model, whether the training was stopped in between or not.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm
from transformers import LlamaForCausalLM

from hack.training import checkpoints
from hack.training.batches import IGNORED, Batch
from hack.training.checkpoints import Checkpoint
from hack.training.optimizer import MuonAdamW
from hack.training.recipe import Recipe

WORKERS = 2
CHECKPOINT_SECONDS = 120.0
WATCH_STEPS = 60
Watch = Callable[[LlamaForCausalLM], str]  # what to print now and then


@dataclass(frozen=True, slots=True)
class Run:
    """What is not part of the recipe."""

    steps: int
    checkpoint: Path  # a file
    fingerprint: str = ""  # of everything that must not change between two runs
    start: LlamaForCausalLM | None = None  # weights to begin with; None: drawn from the recipe's seed
    teacher: LlamaForCausalLM | None = None  # of a recipe with `distil_from` below 1
    watch: Watch | None = None


def train(recipe: Recipe, data: Iterator[Batch], run: Run) -> tuple[LlamaForCausalLM, float]:
    """Train a model of this recipe in float32, from its checkpoint if there is one.

    Args:
        data: the batches from the first one on; those that the checkpoint has seen are skipped.

    Returns:
        the model, and the seconds that its training took.
    """
    torch.set_num_threads(1)
    torch.manual_seed(recipe.data_seed)
    model = (run.start or LlamaForCausalLM(recipe.config())).train()
    replicas = [model, *(_replica(model) for _ in range(WORKERS - 1))]
    scale = 1.0 if run.start is None else recipe.continued_rate
    optimizer = MuonAdamW(model, scale * recipe.muon_rate, scale * recipe.adam_rate, recipe.weight_decay)
    done, seconds = _resume(model, optimizer, run)
    began = saved = time.monotonic()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    smooth = math.nan
    title = f"{recipe.name} ({parameters / 1e6:.1f} M)"
    with (
        ThreadPoolExecutor(WORKERS, initializer=torch.set_num_threads, initargs=(1,)) as pool,
        tqdm(total=run.steps, initial=done, desc=title, unit="step", mininterval=5) as bar,
    ):
        for step, batch in enumerate(islice(data, done, run.steps), done + 1):
            distils = run.teacher is not None and step > recipe.distil_from * run.steps
            loss = _accumulate(replicas, batch, recipe.micro_rows, run.teacher if distils else None, pool)
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
            optimizer.step(step, learning_rate_at(recipe, run.steps, step), pool)
            smooth = loss if math.isnan(smooth) else 0.95 * smooth + 0.05 * loss
            bar.set_postfix_str(f"{'KL' if distils else 'loss'} {smooth:.3f}", refresh=False)
            bar.update()
            if run.watch is not None and step % WATCH_STEPS == 0 and step < run.steps:
                tqdm.write(f"step {step}: {run.watch(model)}")
                model.train()
            if step == run.steps or time.monotonic() - saved > CHECKPOINT_SECONDS:
                saved = time.monotonic()
                tensors = _weights(model) | optimizer.state()
                checkpoints.save(run.checkpoint, Checkpoint(step, seconds + saved - began, tensors), run.fingerprint)
    return model.eval(), seconds + time.monotonic() - began


def _resume(model: LlamaForCausalLM, optimizer: MuonAdamW, run: Run) -> tuple[int, float]:
    """Steps and seconds that are behind."""
    checkpoint = checkpoints.load(run.checkpoint, run.fingerprint)
    if checkpoint is None:
        return 0, 0.0
    with torch.no_grad():
        for name, parameter in _weights(model).items():
            parameter.copy_(checkpoint.tensors[name])
    optimizer.load(checkpoint.tensors)
    return checkpoint.step, checkpoint.seconds


def _weights(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    return {f"weight.{name}": parameter.detach() for name, parameter in model.named_parameters()}


def _replica(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The same parameters in memory, with gradients of its own."""
    replica = copy.deepcopy(model)
    for parameter, original in zip(replica.parameters(), model.parameters(), strict=True):
        parameter.data = original.data
    return replica


def _accumulate(
    replicas: list[LlamaForCausalLM],
    batch: Batch,
    micro_rows: int,
    teacher: LlamaForCausalLM | None,
    pool: ThreadPoolExecutor,
) -> float:
    """Leave the gradient of the mean loss over the batch's learnt tokens in the first replica; return that loss.

    A few rows at a time: their activations stay in the processor's cache.
    """
    ids, labels = batch
    learnt = int((labels != IGNORED).sum())
    starts = range(0, len(ids), micro_rows)

    def compute(worker: int) -> float:
        replica, total = replicas[worker], 0.0
        replica.train().zero_grad(set_to_none=True)
        for start in starts[worker :: len(replicas)]:
            rows = slice(start, start + micro_rows)
            loss = _loss(replica, ids[rows], labels[rows], teacher) / learnt
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        return total

    losses = list(pool.map(compute, range(len(replicas))))
    for parameters in zip(*(replica.parameters() for replica in replicas), strict=True):
        first, *others = parameters
        for other in others:
            if other.grad is not None:
                first.grad = other.grad if first.grad is None else first.grad + other.grad
    return sum(losses)


def _loss(
    model: LlamaForCausalLM, ids: torch.Tensor, labels: torch.Tensor, teacher: LlamaForCausalLM | None
) -> torch.Tensor:
    """Summed over the learnt tokens: cross-entropy, or the KL divergence from the teacher's distribution."""
    learnt = labels != IGNORED
    logits = _logits(model, ids, learnt)
    if teacher is None:
        return F.cross_entropy(logits, labels[learnt], reduction="sum")
    with torch.no_grad():
        goal = _logits(teacher, ids, learnt).log_softmax(-1)
    return F.kl_div(logits.log_softmax(-1), goal, log_target=True, reduction="sum")


def _logits(model: LlamaForCausalLM, ids: torch.Tensor, learnt: torch.Tensor) -> torch.Tensor:
    """At the learnt positions only, float32 of shape (learnt tokens, vocabulary)."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    logits: torch.Tensor = model.lm_head(hidden[learnt])
    return logits


def learning_rate_at(recipe: Recipe, steps: int, step: int) -> float:
    """Share of the peak at this step, from 1: a linear warm-up, a plateau, a linear decay to a fiftieth."""
    warmup = min(recipe.warmup_steps, max(1, steps // 4))
    decay_from = max(warmup, recipe.decay_from * steps)
    if step < warmup:
        return step / warmup
    return 1.0 - 0.98 * max(0.0, step - decay_from) / max(1.0, steps - decay_from)
