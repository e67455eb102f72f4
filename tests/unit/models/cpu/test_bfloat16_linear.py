"""Layers whose products take and give bfloat16: no further from float64 than transformers in bfloat16, logits in
float32, one copy of 2 bytes per weight."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from millstream_kernels.cpu import code_folder, decode
from millstream_kernels.cpu.bfloat16.product import MANY_INPUTS, Bfloat16Product
from millstream_runtime.models.arithmetic import Arithmetic
from millstream_runtime.models.cpu.bfloat16_linear import Bfloat16Layout, Bfloat16Linear
from millstream_runtime.models.cpu.sixteen_bits import SixteenBitLinear
from millstream_runtime.models.layers.decoder import Decoder
from millstream_runtime.models.linear.shares import rank_config
from millstream_runtime.models.linear.tensor_parallel import PlannedRanks, Ranks, SingleProcess
from millstream_runtime.models.registry import expected_weights, load_model, load_model_config
from tests.support.bfloat16_operations import ExactOperations
from tests.support.family_cases import Models
from tests.support.tiny_families import logits_of, prompts_of
from tests.support.tiny_model import write_tiny_model
from tests.unit.models.cpu.test_sixteen_bits import stored_as

pytestmark = pytest.mark.skipif(
    code_folder.unsupported_machine(platform.system(), platform.machine(), code_folder.cpu_flags()) is not None,
    reason="the kernels are compiled for x86-64-v3 on Linux",
)
CPU = torch.device("cpu")
DEMO_MODEL = Path(__file__).resolve().parents[4] / "models" / "demo-chat"
ROUNDED = Arithmetic(torch.float32, torch.bfloat16, torch.bfloat16, rounds_products=True)
PRODUCT = Bfloat16Product(ExactOperations(), 1, 2)
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
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def load_rounded(folder: Path, ranks: Ranks = SingleProcess(), **settings: Any) -> Decoder:  # noqa: B008
    config = load_model_config(folder)
    return load_model(config, folder, ROUNDED, CPU, ranks, code=decode.load(), product=PRODUCT, **settings)


@torch.inference_mode()
def logprobs_of_transformers(folder: Path, prompt: list[int], dtype: torch.dtype) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager")
    logits: Tensor = model(torch.tensor([prompt])).logits[0]
    return logits.double().log_softmax(dim=-1)


def errors(found: Tensor, exact: Tensor) -> Tensor:
    """Mean and 99th percentile of the error of log-probabilities."""
    sizes = (found - exact).abs().flatten()
    return torch.stack([sizes.mean(), sizes.kthvalue(int(0.99 * len(sizes))).values])


@pytest.mark.matrix("family")
@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_is_further_from_float64_than_transformers_in_bfloat16(
    family: str, models: Models, tmp_path: Path
) -> None:
    """Biases, tied heads, scaled embeddings, experts, latents and reordered outputs among them."""
    folder = stored_as(models.folder(family), tmp_path / "model", {"": torch.bfloat16})
    [prompt] = prompts_of([41])
    model = load_rounded(folder)
    logits = logits_of(model, rank_config(model.config, PlannedRanks(0, 1)), prompt, 23, torch.float32)
    assert logits.dtype is torch.float32
    exact = logprobs_of_transformers(folder, prompt, torch.float64)
    own, other = (
        errors(found, exact)
        for found in (
            logits.double().log_softmax(dim=-1),
            logprobs_of_transformers(folder, prompt, torch.bfloat16),
        )
    )
    assert (own <= other).all(), (own, other)
    assert model.weight_bytes == expected_weights(model.config, ROUNDED).num_bytes


def test_the_demo_model_answers_nearer_to_float64_than_transformers_do_and_no_two_logits_tie() -> None:
    """Near 20, bfloat16 has steps of 0.125: with a rounded head the best two tokens of some positions are equal."""
    generator = torch.Generator().manual_seed(5)
    prompt = torch.randint(3, 2000, (400,), generator=generator).tolist()
    model = load_rounded(DEMO_MODEL)
    logits = logits_of(model, model.config, prompt, 400, torch.float32)
    exact, rounded = (logprobs_of_transformers(DEMO_MODEL, prompt, one) for one in (torch.float64, torch.bfloat16))
    own, other = errors(logits.double().log_softmax(dim=-1), exact), errors(rounded, exact)
    assert (own <= other).all(), (own, other)
    ties, ties_of_rounded = (
        int((top[:, 0] == top[:, 1]).sum()) for top in (one.topk(2).values for one in (logits, logits.bfloat16()))
    )
    assert ties == 0
    assert ties_of_rounded > 0, "then the test above says nothing"


def linears_of(part: Any, found: dict[str, Any], name: str = "") -> dict[str, Any]:
    """The linears of a model by the names of its attributes."""
    if isinstance(part, Bfloat16Linear | SixteenBitLinear):
        found[name] = part
    elif isinstance(part, list | tuple):
        for index, one in enumerate(part):
            linears_of(one, found, f"{name}.{index}")
    elif hasattr(part, "__dataclass_fields__") and not isinstance(part, Bfloat16Product):
        for field in part.__dataclass_fields__:
            linears_of(getattr(part, field), found, f"{name}.{field}")
    elif isinstance(part, Decoder):
        for field, value in vars(part).items():
            linears_of(value, found, f"{name}.{field}")
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "deepseek-v3"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_head_and_the_sums_of_ranks_are_not_rounded(
    family: str, num_ranks: int, models: Models, tmp_path: Path
) -> None:
    folder = stored_as(models.folder(family), tmp_path / "model", {"": torch.bfloat16})
    linears = linears_of(load_rounded(folder, PlannedRanks(0, num_ranks)), {})
    are_rounded = {name: isinstance(linear, Bfloat16Linear) for name, linear in linears.items()}
    ends = {
        name for name in linears if "head" in name or ((".down" in name or ".output" in name) and "query" not in name)
    }
    of_head = {name for name in ends if "head" in name}
    assert len(of_head) == 1
    assert ends - of_head
    for name, is_rounded in are_rounded.items():
        stays_wide = name in of_head or (num_ranks > 1 and name in ends)
        assert is_rounded != stays_wide, name


@pytest.mark.parametrize("num_inputs", [64, MANY_INPUTS])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_rounds_its_product_once_and_adds_bias_and_residual_in_float32(num_inputs: int, has_bias: bool) -> None:
    random = torch.Generator().manual_seed(1)
    rows = [torch.randn(count, num_inputs, generator=random).bfloat16() for count in (5, 11)]
    bias = torch.randn(16, generator=random) if has_bias else None
    layout = Bfloat16Layout(torch.float32, 0, decode.load(), PRODUCT)
    linear = layout.linear_of_parts(rows, bias, may_round=True)
    assert isinstance(linear, Bfloat16Linear)
    assert layout.copy_bytes == 2 * 16 * num_inputs
    for count in (0, 1, 2, 17, 100):
        x, residual = torch.randn(count, num_inputs, generator=random), torch.randn(count, 16, generator=random)
        product = (x.bfloat16().double() @ torch.cat(rows).double().t()).bfloat16().float()
        expected = product if bias is None else product + bias
        assert torch.equal(linear(x), expected)
        assert torch.equal(linear.without_bias()(x), product)
        order = [3, 0, 15, 7]
        assert torch.equal(linear.reordered(order)(x), expected[:, order])
        before = residual.clone()
        linear.add_to(residual, x)
        assert torch.equal(residual, before + expected)


class CountedRows(ExactOperations):
    """Notes how many rows each product has."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def product(self, x: Tensor, packed: Tensor) -> Tensor:
        self.counts.append(len(x))
        return super().product(x, packed)


def test_as_many_rows_are_computed_as_the_check_asked_for_and_no_others_than_onednn_has_code_for() -> None:
    operations = CountedRows()
    product = Bfloat16Product(operations, 1, 4)
    layout = Bfloat16Layout(torch.float32, 0, decode.load(), product)
    for num_inputs, computed in ((64, [1, 2, 3, 5, 16, 18, 104]), (MANY_INPUTS, [4, 4, 4, 5, 16, 18, 104])):
        linear = layout.linear_of_parts([torch.ones(16, num_inputs, dtype=torch.bfloat16)], None, may_round=True)
        operations.counts.clear()
        for count in (1, 2, 3, 5, 16, 17, 100):
            assert linear(torch.ones(count, num_inputs)).eq(num_inputs).all()
        assert operations.counts == computed


def test_weights_of_float16_are_not_rounded_to_bfloat16(models: Models, tmp_path: Path) -> None:
    dtypes = {"": torch.bfloat16, "o_proj.weight": torch.float16}
    linears = linears_of(load_rounded(stored_as(models.folder("llama"), tmp_path / "model", dtypes)), {})
    assert {type(linear) for name, linear in linears.items() if ".output" in name} == {SixteenBitLinear}
    assert Bfloat16Linear in {type(linear) for linear in linears.values()}


LOADS = """
import sys
from pathlib import Path
import torch
from millstream_kernels.cpu import decode
from millstream_kernels.cpu.bfloat16.product import Bfloat16Product
from millstream_runtime.models.arithmetic import Arithmetic
from millstream_runtime.models.registry import load_model, load_model_config

class Copies:  # a packed weight takes as many bytes as it has
    def pack(self, weight):
        return weight.clone()

def anonymous_bytes():  # what the process has taken; pages of mapped files are not in it
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10

folder, peaks, code = Path(sys.argv[1]), [], decode.load()
config, before = load_model_config(folder), anonymous_bytes()
model = load_model(
    config, folder, Arithmetic(torch.float32, torch.bfloat16, torch.bfloat16, rounds_products=True),
    torch.device("cpu"), code=code, product=Bfloat16Product(Copies(), 1, 2),
    on_read=lambda done, total: peaks.append(anonymous_bytes()),
)
peaks.append(anonymous_bytes())
print(max(peaks) - before, model.weight_bytes)
"""


def test_a_load_takes_little_more_than_the_file(tmp_path: Path) -> None:
    """Measured behind each tensor of a checkpoint of 100 MB, in a process of its own."""
    shape = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 4}
    shape |= {"head_dim": 128, "vocab_size": 4096, "num_hidden_layers": 5}
    folder = stored_as(write_tiny_model(tmp_path / "plain", **shape), tmp_path / "model", {"": torch.bfloat16})
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
