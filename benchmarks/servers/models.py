"""The models that every server gets, and the forms that some of them need: GGUF for llama.cpp, IR for OpenVINO."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.servers.vocabulary import first_word_id, write_tokenizer
from benchmarks.shapes import LARGER

ROOT = Path(__file__).resolve().parents[2]
DEMO_MODEL = ROOT / "models" / "demo-chat"
FLOAT32_BYTES = 4
CONCURRENT = 128  # requests that every server must be able to hold at once


@dataclass(frozen=True)
class Lengths:
    """Inclusive ranges of tokens, as `--input-tokens` of `millstream bench` reads them."""

    input_tokens: str
    output_tokens: str

    def with_answers_of(self, most_tokens: int) -> Lengths:
        """The same with answers of at most so many tokens."""
        capped = (str(min(int(bound), most_tokens)) for bound in self.output_tokens.split(":"))
        return Lengths(self.input_tokens, ":".join(capped))


@dataclass(frozen=True)
class Model:
    """A model folder of Hugging Face's layout and the load that it is measured with."""

    name: str  # in file names
    description: str
    folder: Path
    max_model_len: int
    first_id: int  # token ids from here on are plain text
    lengths: dict[str, Lengths]

    @property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        return config

    @property
    def kv_cache_tokens(self) -> int:
        """Room for all requests at their longest: no server has to preempt."""
        return self.max_model_len * CONCURRENT

    @property
    def kv_cache_bytes(self) -> int:
        """The same in bytes, as float32."""
        config = self.config
        row = int(config["num_key_value_heads"]) * int(config["head_dim"]) * 2 * FLOAT32_BYTES
        return self.kv_cache_tokens * int(config["num_hidden_layers"]) * row


def prepare(name: str, scratch: Path) -> Model:
    """The demo model as it is committed, or the 135 M shape with random weights, which is written to `scratch`."""
    if name == "demo":
        lengths = {"equal": Lengths("64", "128"), "mixed": Lengths("16:256", "16:192")}
        return Model(name, "demo-chat", DEMO_MODEL, 512, first_id=259, lengths=lengths)
    from benchmarks.random_model import write_random_model

    folder = write_random_model(scratch / name, LARGER)
    write_tokenizer(folder, LARGER["vocab_size"])
    for file in ("config.json", "generation_config.json"):  # ids 1 and 2 of a bare LlamaConfig are no special tokens
        settings = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**settings, "bos_token_id": 0, "eos_token_id": 0}, indent=2))
    lengths = {"equal": Lengths("64", "48"), "mixed": Lengths("16:128", "16:64")}
    description = "random weights, 135 M parameters (SmolLM2's shape)"
    return Model(name, description, folder, 256, first_id=first_word_id(), lengths=lengths)


def to_gguf(model: Model, python: Path, scratch: Path) -> Path:
    """A float32 GGUF file with the model's vocabulary."""
    file = scratch / f"{model.name}.gguf"
    _convert([str(python), str(ROOT / "benchmarks" / "gguf_llama.py"), str(model.folder), str(file)])
    return file


def to_openvino(model: Model, exporter: Path, scratch: Path) -> Path:
    """A folder with a float32 IR, and the tokenizer of the model beside it."""
    folder = scratch / f"{model.name}-openvino"
    wanted = ["--task", "text-generation-with-past", "--weight-format", "fp32"]
    _convert([str(exporter), "export", "openvino", "--model", str(model.folder), *wanted, str(folder)])
    shutil.copy(model.folder / "tokenizer.json", folder)
    return folder


def _convert(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the conversion failed: {' '.join(done.stderr.split())[-300:]}")
