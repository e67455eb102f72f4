"""How well target and draft predict text of files that training never saw, by slice.

Agreement is teacher-forced: at how many positions of the text the draft's most likely token is the target's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from hack.training import held_out

MAX_TOKENS = 512  # the rows of training are as long


@dataclass(frozen=True, slots=True)
class SliceEvaluation:
    """Of one slice, or of all together."""

    documents: int
    tokens: int  # that were judged
    target_perplexity: float
    draft_perplexity: float
    agreement_percent: float

    def as_json(self) -> dict[str, float]:
        return {name: round(value, 3) for name, value in asdict(self).items()}


@torch.inference_mode()
def evaluate_slices(
    target: LlamaForCausalLM, draft: LlamaForCausalLM | None, tokenizer: Tokenizer, lines: Sequence[dict[str, Any]]
) -> dict[str, SliceEvaluation]:
    """By slice, and under `all`. Without a draft its figures are NaN."""
    scores: dict[str, list[torch.Tensor]] = {}
    for line in lines:
        score = _score(target, draft, tokenizer, line)
        for name in (line["slice"], "all"):
            scores.setdefault(name, []).append(score)
    found = {}
    for name, of_slice in scores.items():
        tokens, target_nats, draft_nats, agreed = torch.stack(of_slice).sum(0).tolist()
        found[name] = SliceEvaluation(
            documents=len(of_slice),
            tokens=int(tokens),
            target_perplexity=math.exp(target_nats / tokens),
            draft_perplexity=math.exp(draft_nats / tokens),
            agreement_percent=100 * agreed / tokens,
        )
    return found


def _score(
    target: LlamaForCausalLM, draft: LlamaForCausalLM | None, tokenizer: Tokenizer, line: dict[str, Any]
) -> torch.Tensor:
    """Judged tokens, nats of the target, nats of the draft, tokens that both would choose: float64 of shape (4,)."""
    prompt, answer = (list(tokenizer.encode(text).ids) for text in held_out.prompt_and_answer(line))
    if not prompt:  # nothing predicts the first token of a text
        prompt, answer = answer[:1], answer[1:]
    ids = torch.tensor([(prompt + answer)[-MAX_TOKENS:] if len(prompt) > 1 else (prompt + answer)[:MAX_TOKENS]])
    judged = min(len(answer), ids.shape[1] - 1)
    expected = ids[0, -judged:]
    logits = target(input_ids=ids).logits[0, -judged - 1 : -1]
    nats = F.cross_entropy(logits, expected, reduction="sum").item()
    if draft is None:
        return torch.tensor([judged, nats, math.nan, math.nan], dtype=torch.float64)
    drafted = draft(input_ids=ids).logits[0, -judged - 1 : -1]
    draft_nats = F.cross_entropy(drafted, expected, reduction="sum").item()
    agreed = int((drafted.argmax(-1) == logits.argmax(-1)).sum())
    return torch.tensor([judged, nats, draft_nats, agreed], dtype=torch.float64)
