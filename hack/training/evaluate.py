"""What the committed models can do on questions that training never saw.

Perplexity is that of the expected answers. Agreement is what speculative decoding stands on: at how many positions of
the target's own greedy answer the draft, given the same tokens before, would have written the same next token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from tqdm import tqdm
from transformers import LlamaForCausalLM

from hack.training.knowledge import Fact
from hack.training.phrasings import held_out_questions
from hack.training.tokenizer import TURN_END, encode_prompt

MAX_ANSWER_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Of a target and its draft, on the same held-out questions."""

    questions: int
    answer_tokens: int
    target_perplexity: float
    draft_perplexity: float
    target_exact_percent: float  # greedy answers that equal the expected one, word for word
    draft_exact_percent: float
    draft_agreement_percent: float  # of the positions of the target's greedy answers

    def as_json(self) -> dict[str, float]:
        return {name: round(value, 4) for name, value in asdict(self).items()}


def load(folder: Path) -> tuple[LlamaForCausalLM, Tokenizer]:
    """In fp32, as the runtime computes on a CPU."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, Tokenizer.from_file(str(folder / "tokenizer.json"))


@torch.inference_mode()
def evaluate(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, tokenizer: Tokenizer, facts: Sequence[Fact]
) -> Evaluation:
    """Ask every held-out question of these facts."""
    asked = [
        (question, fact.answers[facet])
        for fact in facts
        for facet in fact.answers
        for question in held_out_questions(fact, facet)
    ]
    nats = {"target": 0.0, "draft": 0.0}
    exact = {"target": 0, "draft": 0}
    answer_tokens = greedy_tokens = agreed = 0
    for question, answer in tqdm(asked, desc="held-out questions", unit="question"):
        prompt = encode_prompt(tokenizer, question)
        expected = list(tokenizer.encode(answer + TURN_END).ids)
        answer_tokens += len(expected)
        written = expected  # by the target
        for name, model in (("target", target), ("draft", draft)):
            logits = _logits(model, prompt, expected)
            nats[name] += F.cross_entropy(logits, torch.tensor(expected), reduction="sum").item()
            # Greedy decoding writes the expected answer exactly when every token of it is the best after those before.
            same = logits.argmax(-1).tolist() == expected
            exact[name] += same
            if name == "target" and not same:
                written = greedy(model, prompt)
        best = _logits(draft, prompt, written).argmax(-1)
        agreed += int((best == torch.tensor(written)).sum())
        greedy_tokens += len(written)
    return Evaluation(
        questions=len(asked),
        answer_tokens=answer_tokens,
        target_perplexity=math.exp(nats["target"] / answer_tokens),
        draft_perplexity=math.exp(nats["draft"] / answer_tokens),
        target_exact_percent=100 * exact["target"] / len(asked),
        draft_exact_percent=100 * exact["draft"] / len(asked),
        draft_agreement_percent=100 * agreed / greedy_tokens,
    )


def greedy(model: LlamaForCausalLM, prompt: list[int]) -> list[int]:
    """The greedy answer with the mark that ends it, if it ends within MAX_ANSWER_TOKENS."""
    ids = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=MAX_ANSWER_TOKENS)
    return list(ids[0, len(prompt) :].tolist())


def answer_text(model: LlamaForCausalLM, tokenizer: Tokenizer, question: str) -> str:
    return str(tokenizer.decode(greedy(model, encode_prompt(tokenizer, question)), skip_special_tokens=True))


def _logits(model: LlamaForCausalLM, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Logits before each token of the answer, float32 of shape (answer tokens, vocabulary)."""
    logits: torch.Tensor = model(input_ids=torch.tensor([prompt + answer])).logits[0]
    return logits[len(prompt) - 1 : -1]
