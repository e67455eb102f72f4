"""The head of the demo model: how it is trained, and what the committed one is worth."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from hack.training import eagle_acceptance, knowledge
from hack.training.batches import Batch
from hack.training.eagle_head import NAME, export, goal_of, head_loss, train_head
from hack.training.recipe import DEMO
from millstream_runtime.models.eagle import heads

MODELS = Path(__file__).parents[3] / "models"


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(1)
    shape = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2)).eval()


def rows(seed: int) -> Iterator[Batch]:
    """Rows that count upwards from a random token."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        ids = (torch.randint(64, (4, 1), generator=generator) + torch.arange(24)) % 64
        yield ids, ids


@pytest.mark.deep
def test_training_brings_the_head_closer_to_its_target(target: LlamaForCausalLM, tmp_path: Path) -> None:
    goal = goal_of(target, next(rows(9))[0])
    losses = []
    for steps in (1, 30):
        head = train_head(target, rows(2), steps)
        with torch.no_grad():
            losses.append(float(head_loss(head, target, goal)))
    assert losses[1] < 0.7 * losses[0]
    again = train_head(target, rows(2), 30)
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, dict(head.named_parameters())[name]), "seeded"
    export(head, tmp_path)
    shape = heads.read_head_folder(tmp_path)
    assert heads.load(shape, tmp_path, torch.float32, torch.device("cpu")).config.hidden_size == 64


def test_the_committed_head_is_small() -> None:
    path = MODELS / NAME / "model.safetensors"
    assert path.stat().st_size < 1_000_000
    assert sum(one.stat().st_size for one in path.parent.iterdir()) < 1_010_000
    with safe_open(path, "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118 - not a dict


def test_the_committed_head_knows_its_target() -> None:
    """A part of what its card says, measured again."""
    recorded = json.loads((MODELS / NAME / "training.json").read_text())["acceptance"][NAME][DEMO]
    tokenizer = Tokenizer.from_file(str(MODELS / "demo-chat" / "tokenizer.json"))
    found = eagle_acceptance.measure(MODELS, MODELS / NAME, tokenizer, knowledge.load()[::24], [])
    assert found.found[NAME][DEMO].first_percent > recorded["first_percent"] - 15
    assert found.found[NAME][DEMO].tokens_per_check > 0.5 * recorded["tokens_per_check"] > 0
