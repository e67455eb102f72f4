"""A tiny target, a draft that is the target with noise, and prompts."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from millstream.cli import main
from tests.support.tiny_model import write_tiny_model

FEW = ("--sequence-tokens=48", "--max-answer-tokens=12", "--rows=8", "--device=cpu")
ENOUGH = ("--steps=40", "--learning-rate=0.001")  # to gain points


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Small products on many threads wait for each other where other processes use the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, hidden size 64. Each next token follows from the one before more than from the others, and is nearly
    certain: 40 documents are enough to learn that."""
    folder = write_tiny_model(tmp_path_factory.mktemp("target") / "target", scale=0.2)
    tensors = load_file(folder / "model.safetensors")
    factors = {"o_proj": 0.2, "down_proj": 0.2, "lm_head": 4.0}
    scaled = {name: one * factors.get(name.split(".")[-2], 1.0) for name, one in tensors.items()}
    save_file(scaled, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def draft(target: Path) -> Path:
    """The target with noise in its output head, in bfloat16."""
    folder = target.parent / "draft"
    shutil.copytree(target, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    tensors = load_file(target / "model.safetensors")
    noise = torch.randn(tensors["lm_head.weight"].shape, generator=torch.Generator().manual_seed(1))
    tensors["lm_head.weight"] += 0.6 * noise
    halves = {name: one.bfloat16() for name, one in tensors.items()}
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """70 documents of 60 to 70 letters, a letter being a token: texts, completions and chats."""
    path = tmp_path_factory.mktemp("data") / "traffic.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows(70, seed=3)))
    return path


def rows(count: int, seed: int) -> list[dict[str, object]]:
    """Documents of slice `all`, each form in turn."""
    choose = random.Random(seed)
    found: list[dict[str, object]] = []
    for number in range(count):
        words = ["".join(choose.choices("abcdefgh ", k=length)) for length in (20, 50)]
        chat = [{"role": "user", "content": words[0]}, {"role": "assistant", "content": words[1]}]
        forms: list[dict[str, object]] = [
            {"text": words[0] + words[1]},
            {"prompt": words[0], "completion": words[1]},
            {"messages": chat},
        ]
        found.append(forms[number % 3])
    return found


def tune(target: Path, draft: Path, data: Path, out: Path, *flags: str) -> int:
    """The exit code."""
    return main(["tune-draft", str(target), str(draft), f"--data={data}", f"--out={out}", *FEW, *flags])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*"))}
