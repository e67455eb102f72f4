"""Weights that a CPU holds in 16 bits: the same logits as transformers has in float32 with the same numbers, one copy
of 2 bytes per weight, and a load that needs no more."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from millstream_kernels.cpu import code_folder, decode
from millstream_runtime.errors import InvalidConfigError
from millstream_runtime.models.arithmetic import Arithmetic
from millstream_runtime.models.layers.decoder import Decoder
from millstream_runtime.models.linear.shares import rank_config
from millstream_runtime.models.linear.tensor_parallel import PlannedRanks
from millstream_runtime.models.registry import expected_weights, load_model, load_model_config
from tests.support.family_cases import CASES, Models
from tests.support.tiny_families import logits_of, prompts_of
from tests.support.tiny_model import write_tiny_model

pytestmark = pytest.mark.skipif(
    code_folder.unsupported_machine(platform.system(), platform.machine(), code_folder.cpu_flags()) is not None,
    reason="the kernels are compiled for x86-64-v3 on Linux",
)
CPU = torch.device("cpu")
HELD = Arithmetic(torch.float32, torch.bfloat16, torch.bfloat16)
DEMO_MODEL = Path(__file__).resolve().parents[4] / "models" / "demo-chat"
FAMILIES = (
    "llama-biases",
    "qwen2-ratio-7-tied",
    "gemma3",
    "phi3",
    "qwen3-moe",
    "deepseek-v3",
    "deepseek-v3-half-split",
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny products gain nothing from a second thread, and lose a lot to one that has to wait for a core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def stored_as(folder: Path, target: Path, dtypes: dict[str, torch.dtype]) -> Path:
    """The folder with the tensors whose name ends so rounded to a type; "" is all others."""
    shutil.copytree(folder, target)
    for path in target.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            dtype = next((one for ending, one in dtypes.items() if ending and name.endswith(ending)), dtypes[""])
            tensors[name] = tensor.to(dtype)
        save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config.pop("dtype", None)
    (target / "config.json").write_text(json.dumps(config | {"torch_dtype": str(dtypes[""]).removeprefix("torch.")}))
    return target


def load_held(folder: Path, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Decoder:
    config = load_model_config(folder)
    return load_model(config, folder, Arithmetic(torch.float32, dtype, dtype), CPU, code=decode.load(), **settings)


@torch.inference_mode()
def logits_in_float32(folder: Path, prompt: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits: torch.Tensor = model(torch.tensor([prompt])).logits[0]
    return logits


@pytest.mark.matrix("family")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers_in_float32(
    family: str, dtype: torch.dtype, models: Models, tmp_path: Path
) -> None:
    """Biases, tied heads, scaled embeddings, experts, latents and reordered outputs among them."""
    folder, [prompt] = stored_as(models.folder(family), tmp_path / "model", {"": dtype}), prompts_of([41])
    model = load_held(folder, dtype)
    logits = logits_of(model, rank_config(model.config, PlannedRanks(0, 1)), prompt, 23, torch.float32)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, logits_in_float32(folder, prompt), rtol=1e-4, atol=1e-4)
    planned = expected_weights(model.config, Arithmetic(torch.float32, dtype, dtype)).num_bytes
    assert model.weight_bytes == planned < expected_weights(model.config, torch.float32).num_bytes


def test_a_tensor_keeps_its_own_16_bits_and_a_wider_one_is_rounded_to_those_of_the_checkpoint(
    models: Models, tmp_path: Path
) -> None:
    """Query and key in two 16-bit types side by side, and a float32 MLP in a bfloat16 checkpoint."""
    dtypes = {"": torch.bfloat16, "k_proj.weight": torch.float16, "o_proj.weight": torch.float16}
    folder = stored_as(models.folder("llama"), tmp_path / "mixed", dtypes | {"down_proj.weight": torch.float32})
    rounded = stored_as(
        folder, tmp_path / "rounded", {"": torch.bfloat16, "o_proj.weight": torch.float16}
    )  # what is side by side gets one type
    [prompt] = prompts_of([41])
    model = load_held(folder)
    logits = logits_of(model, model.config, prompt, 41, torch.float32)
    torch.testing.assert_close(logits, logits_in_float32(rounded, prompt), rtol=1e-4, atol=1e-4)


def test_a_number_beyond_float16_is_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "large", scale=1e5)
    with pytest.raises(InvalidConfigError, match=r"--dtype is float16, but tensor model\.\S+ holds numbers too large"):
        load_held(folder, torch.float16)
    assert load_held(folder, torch.bfloat16).weight_bytes > 0


def test_the_demo_model_takes_two_bytes_for_each_weight_and_two_more_for_those_of_norms() -> None:
    """Its head is tied: the table is there once. All outputs are multiples of 16, so nothing is padded."""
    with safe_open(DEMO_MODEL / "model.safetensors", framework="pt") as file:
        sizes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    matrices = sum(shape[0] * shape[1] for shape in sizes.values() if len(shape) == 2)
    vectors = sum(shape[0] for shape in sizes.values() if len(shape) == 1)
    assert load_held(DEMO_MODEL).weight_bytes == 2 * matrices + 4 * vectors
    assert load_held(DEMO_MODEL, copy_budget_bytes=1 << 30).weight_bytes == 2 * matrices + 4 * vectors, "no copies"


def test_rows_of_a_tied_table_are_those_of_the_file(tmp_path: Path) -> None:
    with safe_open(DEMO_MODEL / "model.safetensors", framework="pt") as file:
        stored = file.get_tensor("model.embed_tokens.weight")
    model, tokens = load_held(DEMO_MODEL), torch.tensor([5, 0, len(stored) - 1, 17, 17])
    assert torch.equal(model.embed(tokens), stored[tokens].float())


LOADS = """
import sys, threading
from pathlib import Path
import torch
from millstream_kernels.cpu import decode
from millstream_runtime.models.arithmetic import Arithmetic
from millstream_runtime.models.registry import load_model, load_model_config

def anonymous_bytes():  # what the process has taken; pages of mapped files are not in it
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10

folder, peaks, code = Path(sys.argv[1]), [], decode.load()
config, before = load_model_config(folder), anonymous_bytes()
model = load_model(
    config, folder, Arithmetic(torch.float32, torch.bfloat16, torch.bfloat16), torch.device("cpu"), code=code,
    on_read=lambda done, total: peaks.append(anonymous_bytes()),
)
peaks.append(anonymous_bytes())
print(max(peaks) - before, model.weight_bytes)
"""


def test_a_load_takes_little_more_than_the_file(tmp_path: Path) -> None:
    """Measured behind each tensor of a checkpoint of 100 MB, in a process of its own."""
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 4}
    shape |= {"head_dim": 128, "vocab_size": 4096, "num_hidden_layers": 3}
    plain = write_tiny_model(tmp_path / "plain", **shape)
    folder = stored_as(plain, tmp_path / "model", {"": torch.bfloat16})
    file_bytes = (folder / "model.safetensors").stat().st_size
    assert file_bytes > 90e6
    # Tensors that glibc takes from the system one by one: from its heap, holes would be counted that only it can fill.
    alone = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    result = subprocess.run(
        [sys.executable, "-c", LOADS, str(folder)],
        env=os.environ | alone,
        capture_output=True,
        text=True,
        check=True,
    )
    peak_bytes, weight_bytes = map(int, result.stdout.split())
    assert weight_bytes <= 1.001 * file_bytes
    assert 0.9 * file_bytes < peak_bytes <= 1.2 * file_bytes


@pytest.mark.parametrize("family", CASES)
def test_every_family_is_counted_before_it_is_loaded(family: str, models: Models) -> None:
    """Also of a checkpoint in float32, whose weights are rounded while they are read."""
    model = load_held(models.folder(family))
    assert model.weight_bytes == expected_weights(model.config, HELD).num_bytes
