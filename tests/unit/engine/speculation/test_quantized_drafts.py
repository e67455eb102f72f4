"""Drafts of models that `millstream quantize` made in 4 bits: the draft of the demo pair, and its target for itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.cli import main
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.request import Request, SamplingParams
from millstream_runtime.tokenizing.tokenizer import Tokenizer
from tests.support.drafting_engines import DRAFT_MODEL, counts
from tests.support.engines import MakeEngine, generate, greedy

pytestmark = pytest.mark.usefixtures("one_thread")
MODELS = Path(__file__).parents[4] / "models"
TARGET, DRAFT = MODELS / "demo-chat", MODELS / "demo-draft"
QUESTIONS = ("What is a KV cache?", "What does a readiness probe do?")


def rounded(model: Path, out: Path) -> Path:
    """The model in 4 bits, rounded to nearest."""
    assert main(["quantize", str(model), f"--out={out}", "--device=cpu", "--method=rtn", "--no-quality"]) == 0
    return out


@pytest.fixture(scope="module")
def target_in_4_bits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rounded(TARGET, tmp_path_factory.mktemp("target") / "out")


@pytest.fixture(scope="module")
def draft_in_4_bits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rounded(DRAFT, tmp_path_factory.mktemp("draft") / "out")


def requests() -> list[Request]:
    """One greedy, one seeded."""
    tokenizer = Tokenizer.from_folder(TARGET)
    samplings = (greedy(32), SamplingParams(32, temperature=0.7, seed=5))
    prompts = [tokenizer.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    return [Request(str(index), *one) for index, one in enumerate(zip(prompts, samplings, strict=True))]


def drafted(make_engine: MakeEngine, target: Path, draft: Path) -> Engine:
    return make_engine(
        target,
        **DRAFT_MODEL,
        draft_model=str(draft),
        max_draft_tokens=4,
        kv_cache_memory_bytes=8 << 20,
    )


def acceptance(engine: Engine) -> float:
    found = counts(engine)
    assert found.num_draft_tokens > 0
    return found.num_accepted_tokens / found.num_draft_tokens


def test_a_quantized_model_drafts_for_its_target(
    draft_in_4_bits: Path, target_in_4_bits: Path, make_engine: MakeEngine
) -> None:
    """The draft of the pair, and the target in 4 bits as a draft for itself in 16."""
    plain = make_engine(TARGET, kv_cache_memory_bytes=4 << 20)
    expected = generate(plain, requests())
    assert min(map(len, expected.values())) > 15
    for draft in (draft_in_4_bits, target_in_4_bits):
        engine = drafted(make_engine, TARGET, draft)
        assert generate(engine, requests()) == expected
        assert acceptance(engine) > 0.8
        assert (engine.memory_use.draft_weights_bytes or 0) > 0


def test_a_quantized_target_has_its_own_weights_as_its_draft(target_in_4_bits: Path, make_engine: MakeEngine) -> None:
    expected = generate(make_engine(target_in_4_bits, kv_cache_memory_bytes=4 << 20), requests())
    engine = drafted(make_engine, target_in_4_bits, target_in_4_bits)
    assert generate(engine, requests()) == expected
    assert acceptance(engine) > 0.8
