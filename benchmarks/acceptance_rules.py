"""How many drafts of a draft model stand by either rule of acceptance, for sampled requests without a seed.

    python -m benchmarks.acceptance_rules        # the demo pair; --save writes results/acceptance_rules.json

Counted are accepted drafts per check, so the figures do not depend on the machine's load. Tokens are drawn with random
seeds: figures of two runs differ a little.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from benchmarks.speculation import DEMO_DRAFT, DEMO_MODEL, QUESTIONS
from millstream_runtime.config import AcceptanceRule, Device, GovernorMode, RuntimeConfig, SpeculationMethod
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.request import Request, SamplingParams
from millstream_runtime.tokenizing.tokenizer import Tokenizer

RESULT = Path(__file__).parent / "results" / "acceptance_rules.json"
HELD_OUT = DEMO_MODEL.parent / "held_out.jsonl"
PROMPT_TOKENS, MOST_TOKENS, DRAFT_TOKENS = 64, 48, 5
SAMPLINGS = {
    "temperature 0.7": SamplingParams(MOST_TOKENS, 0.7),
    "temperature 1": SamplingParams(MOST_TOKENS, 1.0),
    "temperature 1, top-p 0.9": SamplingParams(MOST_TOKENS, 1.0, top_p=0.9),
}


def prompts() -> dict[str, list[list[int]]]:
    """Questions of the kind that the pair was trained on, and beginnings of held-out texts."""
    tokenizer = Tokenizer.from_folder(DEMO_MODEL)
    asked = [tokenizer.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    found = {"questions": [list(one) for one in asked] * 4}
    for line in HELD_OUT.read_text().splitlines():
        one = json.loads(line)
        if "text" in one:
            found.setdefault(one["slice"], []).append(list(tokenizer.encode(one["text"]))[:PROMPT_TOKENS])
    return {name: some[:12] for name, some in found.items()}


def engine_of(rule: AcceptanceRule) -> Engine:
    """Return an engine that checks all drafts."""
    config = RuntimeConfig(
        model=str(DEMO_MODEL),
        served_model_name="bench",
        device=Device.CPU,
        max_num_seqs=16,
        enable_prefix_caching=False,
        speculation_method=SpeculationMethod.DRAFT_MODEL,
        draft_model=str(DEMO_DRAFT),
        max_draft_tokens=DRAFT_TOKENS,
        speculation_governor=GovernorMode.DISABLED,
        speculation_acceptance=rule,
    )
    return Engine(config, lambda phase, message: None)


def measure(engine: Engine, some: list[list[int]], sampling: SamplingParams) -> dict[str, float]:
    """Answer all prompts at once."""
    before = engine.stats().speculation
    for index, prompt in enumerate(some):
        engine.add_request(Request(str(index), prompt, sampling))
    while engine.has_work():
        engine.step()
    after = engine.stats().speculation
    if before is None or after is None:
        raise RuntimeError("the engine does not speculate")
    accepted = after.num_accepted_tokens - before.num_accepted_tokens
    return {
        "accepted_per_check": round(accepted / (after.num_checks - before.num_checks), 2),
        "acceptance": round(accepted / (after.num_draft_tokens - before.num_draft_tokens), 3),
    }


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    engines = {rule: engine_of(rule) for rule in AcceptanceRule}
    results = []
    for name, some in prompts().items():
        for sampled, sampling in SAMPLINGS.items():
            for rule, engine in engines.items():
                found = {"prompts": name, "sampling": sampled, "rule": rule, **measure(engine, some, sampling)}
                print(json.dumps(found), flush=True)
                results.append(found)
    if args.save:
        RESULT.write_text(json.dumps({"draft_tokens": DRAFT_TOKENS, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
