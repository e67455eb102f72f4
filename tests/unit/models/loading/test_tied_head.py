"""A stored head that config.json ties to the embedding: where its numbers differ it is the one that answers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from millstream_operator.catalog.inspected_model import read_inspected
from millstream_runtime.errors import RuntimeFailure
from millstream_runtime.models.loading import tied_head
from millstream_runtime.models.registry import load_model_config
from millstream_runtime.sources.inspection.inspect import inspect_folder
from tests.support.family_cases import dense
from tests.support.tiny_families import model_logits, prompts_of, reference_logits, write_family

FAMILY = dense("qwen2", tie_word_embeddings=True)
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def write(folder: Path, head: str) -> Path:
    """`head`: "none", "equal", "own" in every row, or "own row": in the last one alone; "alone": no embedding."""
    write_family(folder, **FAMILY)
    files = [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]
    tensors = {
        name: tensor for path in files if path.suffix == ".safetensors" for name, tensor in load_file(path).items()
    }
    for path in files:
        path.unlink()
    stored = tensors[EMBEDDING].clone()
    if head == "own":
        stored = stored.roll(1, 0) * 0.5
    elif head == "own row":
        stored[-1] *= 3
    if head == "alone":
        del tensors[EMBEDDING]
    save_file(tensors | ({} if head == "none" else {HEAD: stored}), folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("head", ["none", "equal", "own", "own row", "alone"])
def test_the_logits_are_those_of_transformers(
    head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tied_head, "ROWS_AT_ONCE", 10)  # the last row is in a later piece than the first
    folder = write(tmp_path / "model", head)
    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    (prompt,) = prompts_of([20])
    with caplog.at_level(logging.WARNING, logger="millstream"):
        ours = model_logits(folder, prompt, 20)
    torch.testing.assert_close(ours, reference_logits(reference, prompt), atol=1e-4, rtol=0)
    has_own = head.startswith("own")
    assert load_model_config(folder).tie_word_embeddings is not has_own
    assert any(record.message == "head_not_tied" for record in caplog.records) is has_own


def test_an_untied_model_without_an_embedding_is_refused(tmp_path: Path) -> None:
    """transformers would draw the embedding's numbers at random."""
    folder = write(tmp_path / "model", "alone")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(RuntimeFailure, match=r"tensor model.embed_tokens.weight .* is missing from the checkpoint"):
        model_logits(folder, [1, 2, 3], 3)


@pytest.mark.parametrize("head", ["none", "own", "alone"])
def test_the_plan_counts_a_stored_head(head: str, tmp_path: Path) -> None:
    answer = inspect_folder(write(tmp_path / "model", head))
    parameters = read_inspected(answer).shape.parameters
    assert parameters.head == (parameters.embedding if head == "own" else 0)
    of_an_earlier_release: dict[str, Any] = {**answer["weights"]}
    of_an_earlier_release.pop("stored_lm_head", None)
    stored_answer = answer | {"weights": of_an_earlier_release}
    assert read_inspected(stored_answer).shape.parameters.head == 0, "an upgrade makes no other plan of stored facts"
