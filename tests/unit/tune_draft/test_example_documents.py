"""The documents that `examples/tuned-draft.yaml` says how to make are enough for a tuning of the demo pair."""

from __future__ import annotations

import subprocess
from pathlib import Path

import yaml

from millstream_runtime.models.registry import load_model_config
from millstream_runtime.tokenizing.tokenizer import Tokenizer
from millstream_runtime.tune_draft.documents import MIN_TRAINING_DOCUMENTS, read_prompts
from millstream_runtime.tune_draft.settings import TuneSettings
from tests.support.console_blocks import ROOT, blocks_of
from tests.support.console_session import link_checkout

EXAMPLE = ROOT / "examples/tuned-draft.yaml"
TARGET, DRAFT = ROOT / "models/demo-chat", ROOT / "models/demo-draft"
MOST_BYTES = 1 << 20  # of a ConfigMap
SEQUENCE_TOKENS = 1024  # the default of the command
COMMENT = "#   "


def settings(folder: Path, data: Path, general: Path | None = None) -> TuneSettings:
    """The defaults of the command."""
    return TuneSettings(
        target=TARGET, draft=DRAFT, data=data, out=folder / "out", general=general, held_out=None, steps=None,
        minutes=20, temperature=1.0, answer_tokens=256, sequence_tokens=SEQUENCE_TOKENS, max_documents=2000, rows=8,
        learning_rate=None, draft_tokens=5, seed=0, device="cpu",
    )  # fmt: skip


def assert_is_enough(asked: TuneSettings) -> None:
    tokenizers = [Tokenizer.from_folder(TARGET), Tokenizer.from_folder(DRAFT)]
    prompts = read_prompts(asked, tokenizers, load_model_config(TARGET).eos_token_ids, SEQUENCE_TOKENS)
    assert len(prompts.training) >= MIN_TRAINING_DOCUMENTS
    assert prompts.watched
    assert prompts.judged


def test_the_documents_of_the_example_ship_and_are_enough(tmp_path: Path) -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    made, created, _ = (line.removeprefix(COMMENT) for line in text.splitlines() if line.startswith(COMMENT))
    link_checkout(tmp_path)
    subprocess.run(["bash", "-c", made], cwd=tmp_path, check=True)
    dataset = yaml.safe_load(text)["spec"]["speculation"]["tuning"]["dataset"]["configMapRef"]
    assert created == f"kubectl create configmap {dataset['name']} --from-file={dataset['key']}"
    data = tmp_path / dataset["key"]
    assert data.stat().st_size <= MOST_BYTES
    assert_is_enough(settings(tmp_path, data))


def test_the_documents_of_the_page_are_enough_for_the_command(tmp_path: Path) -> None:
    made, tuned = blocks_of("docs/draft-tuning.md")
    link_checkout(tmp_path)
    for command in made.commands:
        subprocess.run(["bash", "-c", command.text], cwd=tmp_path, check=True)
    words = tuned.commands[0].text.split()
    data, general = (tmp_path / words[words.index(flag) + 1] for flag in ("--data", "--general"))
    assert_is_enough(settings(tmp_path, data, general))
