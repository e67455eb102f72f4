"""Folders of `millstream quantize` give gptqmodel and compressed-tensors the logits that they give this runtime."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from millstream.cli import main
from tests.packers.tiny_llama import read_expected
from tests.support.tiny_families import model_logits
from tests.support.tiny_model import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = Path(os.environ.get("MILLSTREAM_PACKERS", ROOT / ".tools" / "packers"))
FLOAT32_ERROR = 5e-6  # as in tests/unit/quantization/test_packed_checkpoints.py
MOST_TEST_SECONDS = 1800  # an import of these libraries takes half a minute of processor time
METHODS = {
    "rtn": ("gptqmodel", ["--method=rtn"]),
    "awq": ("gptqmodel", ["--method=awq"]),
    "gptq": ("gptqmodel", ["--method=gptq"]),
    "gptq-act-order": ("gptqmodel", ["--method=gptq", "--act-order=group"]),
    "int8": ("llm-compressor", ["--method=int8"]),
    "fp8-static": ("llm-compressor", ["--method=fp8", "--activation-scheme=static"]),
    "fp8-dynamic": ("llm-compressor", ["--method=fp8"]),
}
pytestmark = pytest.mark.timeout(MOST_TEST_SECONDS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In float16, in which gptqmodel reads what is not packed."""
    folder = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", scale=0.15, torch_dtype="float16")
    weights = folder / "model.safetensors"
    save_file({name: one.half() for name, one in load_file(weights).items()}, weights, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    choose = random.Random(3)
    path = tmp_path_factory.mktemp("data") / "calibration.jsonl"
    rows = [{"text": "".join(choose.choices("abcdefgh ", k=150))} for _ in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", METHODS)
def test_another_library_computes_the_same_with_our_folder(name: str, model: Path, data: Path, tmp_path: Path) -> None:
    packer, flags = METHODS[name]
    folder = tmp_path / "folder"
    command = ["quantize", str(model), f"--out={folder}", "--device=cpu", "--no-quality", *flags]
    needs_data = name not in ("rtn", "fp8-dynamic")
    assert main([*command, *([f"--calibration={data}"] if needs_data else [])]) == 0
    for prompt, wanted in read_expected(logits_by(packer, folder, tmp_path / "logits.safetensors")):
        found = model_logits(folder, prompt, 13)
        assert float((found - wanted.double()).norm() / wanted.double().norm()) < FLOAT32_ERROR


def logits_by(packer: str, folder: Path, file: Path) -> Path:
    """Have a packer's own library compute a folder's logits; they are in `file`."""
    python = ENVIRONMENTS / packer / "bin" / "python"
    assert python.exists(), f"{python} is missing; run `make packers`"
    side = f"tests.packers.{packer.replace('-', '_')}_side"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(python), "-m", side, "logits", str(folder), str(file)],
        cwd=ROOT,
        env=environment | {"HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return file
