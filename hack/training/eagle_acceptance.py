"""How many drafts of an EAGLE head, and of a draft model next to it, stand in the runtime, by kind of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from hack.training.knowledge import Fact
from hack.training.phrasings import held_out_questions
from hack.training.recipe import DEMO, DRAFT, TARGET
from hack.training.tokenizer import encode_prompt
from millstream_runtime.config import Device, GovernorMode, RuntimeConfig, SpeculationMethod
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.request import Request, SamplingParams

DRAFT_TOKENS = 5
PROMPT_TOKENS, ANSWER_TOKENS = 64, 64
MOST_PROMPTS = 24  # of a kind


@dataclass(frozen=True, slots=True)
class Accepted:
    """`percent` of the first drafts, and how many drafts stand in a check on average."""

    first_percent: float
    tokens_per_check: float


@dataclass(frozen=True, slots=True)
class Acceptances:
    """By source of drafts, then by kind of text."""

    draft_tokens: int
    found: Mapping[str, Mapping[str, Accepted]]

    def as_json(self) -> dict[str, Any]:
        return {
            source: {
                kind: {
                    "first_percent": round(one.first_percent, 1),
                    "tokens_per_check": round(one.tokens_per_check, 2),
                }
                for kind, one in kinds.items()
            }
            for source, kinds in self.found.items()
        }

    def as_table(self) -> str:
        """For a model card."""
        sources = [*self.found]
        titles = " | ".join(f"{one}: first draft stands | per check" for one in sources)
        lines = [f"| text | {titles} |", "|---" * (1 + 2 * len(sources)) + "|"]
        for kind in self.found[sources[0]]:
            cells = (self.found[one][kind] for one in sources)
            figures = " | ".join(f"{one.first_percent:.1f} % | {one.tokens_per_check:.2f}" for one in cells)
            lines.append(f"| {kind} | {figures} |")
        return "\n".join(lines)


def measure(
    models: Path, head: Path, tokenizer: Tokenizer, facts: Sequence[Fact], lines: Sequence[Mapping[str, Any]]
) -> Acceptances:
    """Have the target answer, with drafts of the head and of the draft model. `lines`: of `held_out.jsonl`."""
    prompts: dict[str, list[list[int]]] = {DEMO: []}
    for fact in facts[:: max(1, len(facts) // MOST_PROMPTS)]:
        facet = next(iter(fact.answers))
        prompts[DEMO].append(encode_prompt(tokenizer, held_out_questions(fact, facet)[0]))
    for line in lines:
        of_kind = prompts.setdefault(line["slice"], [])
        if len(of_kind) < MOST_PROMPTS:
            text, chat = line.get("text"), line.get("messages")
            tokens = encode_prompt(tokenizer, chat[0]["content"]) if chat else tokenizer.encode(text).ids
            of_kind.append(tokens[:PROMPT_TOKENS])
    sources = {
        head.name: (SpeculationMethod.EAGLE, head),
        DRAFT.name: (SpeculationMethod.DRAFT_MODEL, models / DRAFT.name),
    }
    return Acceptances(
        DRAFT_TOKENS,
        {
            name: {kind: _accepted(models / TARGET.name, method, folder, some) for kind, some in prompts.items()}
            for name, (method, folder) in sources.items()
        },
    )


def _accepted(target: Path, method: SpeculationMethod, folder: Path, prompts: list[list[int]]) -> Accepted:
    config = RuntimeConfig(
        model=str(target),
        served_model_name="target",
        device=Device.CPU,
        kv_cache_memory_bytes=64 << 20,
        max_num_seqs=4,
        max_model_len=512,
        speculation_method=method,
        draft_model=str(folder),
        max_draft_tokens=DRAFT_TOKENS,
        speculation_governor=GovernorMode.DISABLED,
    )
    engine = Engine(config, lambda phase, message: None)
    sampling = SamplingParams(ANSWER_TOKENS, temperature=0.0)
    for index, prompt in enumerate(prompts):
        engine.add_request(Request(str(index), prompt, sampling))
    while engine.has_work():
        engine.step()
    counts = engine.stats().speculation
    engine.close()
    if counts is None or not counts.num_checks:
        raise RuntimeError(f"{folder} proposed nothing")
    return Accepted(
        100 * counts.accepted_per_position[0] / counts.num_checks, counts.num_accepted_tokens / counts.num_checks
    )
