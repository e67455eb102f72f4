"""The training loop: AdamW, a cosine schedule, one progress bar. The same seed and thread count give the same model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm
from transformers import LlamaForCausalLM

from hack.training.batches import IGNORED
from hack.training.recipe import Recipe

Batch = tuple[torch.Tensor, torch.Tensor]


def train(recipe: Recipe, data: Iterator[Batch], device: torch.device, steps: int | None = None) -> LlamaForCausalLM:
    """Train a fresh model of this recipe, in fp32.

    Args:
        data: ids and labels, int64 of shape (rows, tokens).
        steps: fewer steps than the recipe's, for trying out; the schedule shrinks with them.
    """
    steps = steps or recipe.steps
    torch.manual_seed(recipe.data_seed)
    model = LlamaForCausalLM(recipe.config()).to(device).train()
    optimizer = torch.optim.AdamW(_groups(model, recipe.weight_decay), lr=1.0, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_at(recipe, steps))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    smooth = math.nan
    with tqdm(total=steps, desc=f"{recipe.name} ({parameters / 1e6:.1f} M)", unit="step") as bar:
        for _, (ids, labels) in zip(range(steps), data, strict=False):
            logits = model(input_ids=ids.to(device), use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), labels.to(device).flatten(), ignore_index=IGNORED)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
            optimizer.step()
            schedule.step()
            smooth = loss.item() if math.isnan(smooth) else 0.95 * smooth + 0.05 * loss.item()
            bar.set_postfix(loss=f"{smooth:.3f}", refresh=False)
            bar.update()
    return model.eval()


def learning_rate_at(recipe: Recipe, steps: int) -> Callable[[int], float]:
    """Linear warm-up, then a cosine down to a fiftieth."""
    warmup = min(recipe.warmup_steps, max(1, steps // 4))

    def rate(step: int) -> float:
        if step < warmup:
            return recipe.learning_rate * (step + 1) / warmup
        progress = (step - warmup) / max(1, steps - warmup)
        return recipe.learning_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))

    return rate


def _groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Matrices decay; the gains of the norms do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    gains = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": gains, "weight_decay": 0.0}]
