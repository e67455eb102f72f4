"""On a GPU: `millstream quantize` makes every format there, judges it there, and the folder computes what it should."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millstream.cli import main
from millstream_runtime.quantize.settings import Method, weights_files
from tests.support.tiny_families import model_logits, prompts_of
from tests.support.tiny_model import write_tiny_model
from tests.unit.quality.conftest import write_data

pytestmark = pytest.mark.gpu
BLOCKS_OF_256 = {"hidden_size": 256, "intermediate_size": 512}  # GGUF's Q4_K has no smaller ones


def make(folder: Path, method: str, device: str, name: str = "made") -> Path:
    """Quantize a tiny model; `folder` gets the model and its data at the first call."""
    model, data, out = folder / "model", folder / "data.jsonl", folder / name
    if not model.exists():
        write_tiny_model(model, scale=0.05 if method == "gguf" else 0.15, **(BLOCKS_OF_256 if method == "gguf" else {}))
        write_data(data, [{"text": f"{number} of these: {'abcdefgh' * 18} {number}"} for number in range(60)])
    flags = [f"--method={method}", f"--calibration={data}", "--max-sequences=32", "--sequence-tokens=128"]
    code = main(["quantize", str(model), f"--out={out}", f"--device={device}", *flags])
    assert code == (0 if json.loads((out / "quality.json").read_text())["verdict"] == "passed" else 3)
    return out


def check(folder: Path, method: str, device: str) -> None:
    """It computes about what its base does, and the same run gives the same bytes."""
    out = make(folder, method, device)
    (prompt,) = prompts_of([40])
    base, logits = (model_logits(one, prompt, 40).log_softmax(-1) for one in (folder / "model", out))
    assert 0 < (base.exp() * (base - logits)).sum(-1).mean() < 0.5
    again = make(folder, method, device, "again")
    first, second = ({one.name: one.read_bytes() for one in weights_files(made)} for made in (out, again))
    assert first == second


@pytest.mark.parametrize("method", Method)
def test_every_format_is_made_and_judged(method: str, tmp_path: Path) -> None:
    check(tmp_path, method, "cuda")
