"""How many drafts of each kind stand, by kind of text: counted, not timed, so the load of the machine does not matter.

    python -m benchmarks.draft_kinds          # two minutes on one core; --save writes results/draft_kinds.json

The demo model answers greedily with up to five drafts per check and no governor. Its draft model and its EAGLE head
are the committed ones; `millstream quantize` makes the quantized model that drafts for itself. There are no trained
EAGLE-3 and Medusa heads for the demo model, so these kinds are not here. Prompts are of `models/held_out.jsonl`, which
no training saw:

    chat            the conversation before the last answer
    code, prose     the beginning of a text
    edited code     a text of the code slice, then the beginning of the same with its most frequent name replaced
    quoted prose    a text of the prose slice, then its beginning again, as in an answer that quotes a document

The answers are the target's own, and the same for all kinds. What is counted:

    stand               of the drafts that were checked, the share that stood; of first drafts alone
    tokens_per_check    the drafts that stood in a check, and the token that comes with it
    tokens_per_decode   the same of all steps of a request, those without drafts too: n-grams propose only at times
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.request_drafts import renamed
from benchmarks.speculation import DEMO_DRAFT, DEMO_HEAD, DEMO_MODEL, MODELS
from hack.training.held_out import NAME, read
from millstream_runtime.config import Device, GovernorMode, RuntimeConfig, SpeculationMethod
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.request import Request, SamplingParams
from millstream_runtime.quantize.make import make
from millstream_runtime.quantize.settings import Method, QuantizeSettings
from millstream_runtime.tokenizing.tokenizer import Tokenizer

RESULT = Path(__file__).parent / "results" / "draft_kinds.json"
DRAFT_TOKENS, MOST_PROMPTS = 5, 24  # of a check; of a kind of text
PROMPT_TOKENS, QUOTED_TOKENS, ANSWER_TOKENS, MOST_CHAT_TOKENS = 64, 96, 64, 400
Prompts = Mapping[str, list[list[int]]]


class Kind(NamedTuple):
    """A source of drafts. `draft`: a model or head; None: the request itself."""

    name: str
    method: SpeculationMethod
    draft: Path | None = None


def kinds(quantized: Path) -> Iterator[Kind]:
    """All that there are weights for. `quantized`: the target in four bits."""
    yield Kind("n-grams", SpeculationMethod.N_GRAM)
    yield Kind("draft model", SpeculationMethod.DRAFT_MODEL, DEMO_DRAFT)
    yield Kind("EAGLE-1 head", SpeculationMethod.EAGLE, DEMO_HEAD)
    yield Kind("target in 4 bits", SpeculationMethod.DRAFT_MODEL, quantized)


def quantized_target(out: Path) -> Path:
    """Make the target in four bits, rounded to nearest: no calibration data, so nothing of them is in its drafts."""
    settings = QuantizeSettings(
        model=DEMO_MODEL, out=out, method=Method.RTN, group_size=64, calibration=None, held_out=None,
        sequence_tokens=256, max_sequences=1, seed=0, device="cpu", with_quality=False,
    )  # fmt: skip
    make(settings, lambda sentence: None, lambda stage, done, total: None)
    return out


def prompts(most: int = MOST_PROMPTS) -> Prompts:
    """Prompts by kind of text, at most that number of each."""
    tokenizer = Tokenizer.from_folder(DEMO_MODEL)
    found: dict[str, list[list[int]]] = {name: [] for name in ("chat", "code", "prose", "edited code", "quoted prose")}
    for line in read(MODELS / NAME):
        name, text = line["slice"], line.get("text")
        if text is None:
            asked = tokenizer.encode_chat(line["messages"][:-1])
            if len(asked) <= MOST_CHAT_TOKENS:
                found[name].append(asked)
            continue
        begin, whole = encoded(tokenizer, text)
        found[name].append(begin)
        again = encoded(tokenizer, renamed(text))[0] if name == "code" else begin
        found["edited code" if name == "code" else "quoted prose"].append([*whole, *again[: PROMPT_TOKENS // 2]])
    return {name: some[:most] for name, some in found.items()}


def encoded(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[int]]:
    """The first tokens of a text, as a prompt and as a document that is quoted."""
    tokens = list(tokenizer.encode(text))
    return tokens[:PROMPT_TOKENS], tokens[:QUOTED_TOKENS]


def engine_of(kind: Kind) -> Engine:
    """Return an engine that checks all drafts."""
    config = RuntimeConfig(
        model=str(DEMO_MODEL),
        served_model_name="bench",
        device=Device.CPU,
        max_num_seqs=4,
        enable_prefix_caching=False,
        speculation_method=kind.method,
        draft_model=None if kind.draft is None else str(kind.draft),
        max_draft_tokens=DRAFT_TOKENS,
        speculation_governor=GovernorMode.DISABLED,
    )
    return Engine(config, lambda phase, message: None)


def measure(kind: Kind, some: list[list[int]]) -> dict[str, float]:
    """Answer all prompts with drafts of this kind."""
    engine, num_tokens = engine_of(kind), 0
    for index, prompt in enumerate(some):
        engine.add_request(Request(str(index), prompt, SamplingParams(ANSWER_TOKENS, temperature=0.0)))
    while engine.has_work():
        num_tokens += sum(output.token_id is not None and output.prefill is None for output in engine.step())
    counts = engine.stats().speculation
    engine.close()
    if counts is None or not counts.num_checks:
        raise RuntimeError(f"{kind.name} proposed nothing")
    num_decodes = num_tokens - counts.num_accepted_tokens
    return {
        "stand": round(counts.num_accepted_tokens / counts.num_draft_tokens, 3),
        "first_stand": round(counts.accepted_per_position[0] / counts.num_checks, 3),
        "tokens_per_check": round(1 + counts.num_accepted_tokens / counts.num_checks, 2),
        "tokens_per_decode": round(num_tokens / num_decodes, 2),
    }


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=MOST_PROMPTS, help="at most, of each kind of text")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for kind in kinds(quantized_target(Path(scratch) / "quantized")):
            for text, some in prompts(args.prompts).items():
                results.append({"drafts": kind.name, "text": text, "prompts": len(some), **measure(kind, some)})
                print(json.dumps(results[-1]), flush=True)
    if args.save:
        found = {"draft_tokens": DRAFT_TOKENS, "answer_tokens": ANSWER_TOKENS, "results": results}
        RESULT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
