"""The models that every server gets, and the forms that some of them need: GGUF for llama.cpp, IR for OpenVINO."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.servers.vocabulary import first_word_id, write_tokenizer
from benchmarks.shapes import LARGER, ONE_BILLION

ROOT = Path(__file__).resolve().parents[2]
DEMO_MODEL = ROOT / "models" / "demo-chat"
# What `--dtype` of the benchmark is for every server, and the bytes of a number of the KV cache then.
AUTO, FLOAT32 = "auto", "float32"
CACHE_BYTES = {AUTO: 2, FLOAT32: 4}
GIB = 1 << 30
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
    dtype: str = AUTO  # or FLOAT32, of products and of the KV cache

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
        """The same in bytes, in whole GiB: vLLM takes no others."""
        config = self.config
        row = int(config["num_key_value_heads"]) * int(config["head_dim"]) * 2 * CACHE_BYTES[self.dtype]
        return math.ceil(self.kv_cache_tokens * int(config["num_hidden_layers"]) * row / GIB) * GIB


SHAPES = {
    "larger": (LARGER, "random weights, 135 M parameters (SmolLM2's shape)"),
    "1b": (ONE_BILLION, "random weights, 1.2 B parameters (Llama 3.2 1B's shape)"),
}
MODELS = ("demo", *SHAPES)


def prepare(name: str, dtype: str, scratch: Path) -> Model:
    """The demo model as it is committed, or a shape with random weights, which is written to `scratch`: in bfloat16
    where every server chooses its own type, as checkpoints are published."""
    if name == "demo":
        lengths = {"equal": Lengths("64", "128"), "mixed": Lengths("16:256", "16:192")}
        return Model(name, "demo-chat", DEMO_MODEL, 512, first_id=259, lengths=lengths, dtype=dtype)
    import torch

    from benchmarks.random_model import write_random_model

    shape, description = SHAPES[name]
    folder = write_random_model(scratch / name, shape, torch.bfloat16 if dtype == AUTO else torch.float32)
    write_tokenizer(folder, shape["vocab_size"])
    for file in ("config.json", "generation_config.json"):  # ids 1 and 2 of a bare LlamaConfig are no special tokens
        settings = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**settings, "bos_token_id": 0, "eos_token_id": 0}, indent=2))
    lengths = {"equal": Lengths("64", "48"), "mixed": Lengths("16:128", "16:64")}
    return Model(name, description, folder, 256, first_id=first_word_id(), lengths=lengths, dtype=dtype)


def to_gguf(model: Model, python: Path, scratch: Path) -> Path:
    """A GGUF file with the model's vocabulary, in the type that the checkpoint is computed in."""
    file = scratch / f"{model.name}.gguf"
    form = "BF16" if model.dtype == AUTO else "F32"
    _convert([str(python), str(ROOT / "benchmarks" / "gguf_llama.py"), str(model.folder), str(file), form])
    return file


def to_openvino(model: Model, exporter: Path, scratch: Path) -> Path:
    """A folder with an IR, and the tokenizer of the model beside it. OpenVINO keeps 16 bits as float16."""
    folder = scratch / f"{model.name}-openvino"
    form = "fp16" if model.dtype == AUTO else "fp32"
    wanted = ["--task", "text-generation-with-past", "--weight-format", form]
    _convert([str(exporter), "export", "openvino", "--model", str(model.folder), *wanted, str(folder)])
    shutil.copy(model.folder / "tokenizer.json", folder)
    return folder


def _convert(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the conversion failed: {' '.join(done.stderr.split())[-300:]}")
