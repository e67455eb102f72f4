"""A checkpoint of 16 or 32 bits under `--quantization FP8`: the numbers, tokens and bytes of the folder that
`millstream quantize --method fp8` makes of it, without the folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from millstream.cli import main
from millstream_runtime.boot import BootLedger
from millstream_runtime.config import Device, DType, RuntimeConfig, WeightFormat
from millstream_runtime.distributed.leader import Leader
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.execution.shard_config import resolve_shard_config
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.models.config.model_config import ModelConfig
from millstream_runtime.models.linear.shares import Cut, Size, rank_config
from millstream_runtime.models.linear.tensor_parallel import SINGLE_PROCESS, Ranks
from millstream_runtime.models.loading.checkpoint import Checkpoint
from millstream_runtime.models.loading.placement import CheckedOnHost
from millstream_runtime.models.loading.weights import LoadedWeights
from millstream_runtime.models.registry import build_model, expected_weights, layouts_of, load_model, load_model_config
from millstream_runtime.quantization import rounded_while_loading
from millstream_runtime.quantization.rounded_while_loading import RoundedWhileLoadingLayout
from millstream_runtime.server.openai.response_schemas import Readiness
from millstream_runtime.server.operations.readiness import ready_body
from tests.support.allocated_memory import peak_bytes
from tests.support.family_cases import CASES, dense
from tests.support.gguf_files import write_gguf
from tests.support.quantized_checkpoints import awq, quantized
from tests.support.thread_ranks import on_ranks
from tests.support.tiny_families import engine_answers, logits_of, make_engine, prompts_of, write_family

pytestmark = pytest.mark.deep

CPU = torch.device("cpu")
# A tied head and biases, fused parts, experts with routers, latent attention.
FAMILIES = {
    "llama": dense("llama"),
    "qwen2-tied": dense("qwen2", tie_word_embeddings=True),
    "phi3": dense("phi3"),
    "mixtral": dense("mixtral", num_local_experts=3),
    "deepseek-v3": CASES["deepseek-v3"].config,
}
PROMPTS = prompts_of([9, 23])


@pytest.fixture(scope="module", autouse=True)
def _one_thread(one_thread: None) -> None:
    """Small products on many threads wait for each other where other processes use the cores."""


class Folders:
    """Models in bfloat16, and what the command makes of them; each written once."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def plain(self, family: str) -> Path:
        folder = self._root / family
        if not folder.exists():
            write_family(folder, dtype="bfloat16", **FAMILIES[family])
        return folder

    def made(self, family: str) -> Path:
        folder = self._root / f"{family}-fp8"
        if not folder.exists():
            made = ["quantize", str(self.plain(family)), f"--out={folder}", "--method=fp8", "--no-quality"]
            assert main([*made, "--device=cpu"]) == 0
        return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("rounded"))


def config_of(folder: Path, asked: WeightFormat | None) -> ModelConfig:
    config = RuntimeConfig(model=str(folder), served_model_name="tiny", device=Device.CPU, quantization=asked)
    return resolve_shard_config(config).model_config


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()}


def logits(folder: Path, asked: WeightFormat | None = None, ranks: Ranks = SINGLE_PROCESS) -> Tensor:
    config = config_of(folder, asked)
    model = load_model(config, folder, torch.float32, CPU, ranks)
    return logits_of(model, rank_config(config, ranks), PROMPTS[1], 13, torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_codes_and_scales_are_those_that_the_command_writes(family: str, folders: Folders) -> None:
    written = tensors_of(folders.made(family))
    modules = [name.removesuffix(".weight_scale") for name in written if name.endswith(".weight_scale")]
    assert len(modules) >= 8
    layout = RoundedWhileLoadingLayout()
    with Checkpoint(folders.plain(family)) as checkpoint:
        weights = LoadedWeights(checkpoint, torch.float32, CPU)
        for module in modules:
            codes = written[f"{module}.weight"]
            found = layout.unpack(weights, module, *codes.shape)
            assert found is not None
            assert torch.equal(found.codes.view(torch.uint8).t(), codes.view(torch.uint8)), module
            assert torch.equal(found.scales.t(), written[f"{module}.weight_scale"]), module


@pytest.mark.quick
def test_a_cut_has_the_codes_and_scales_of_whole_rows(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded a few rows at a time."""
    monkeypatch.setattr(rounded_while_loading, "MOST_ELEMENTS", 100)
    module, layout = "model.layers.1.mlp.down_proj", RoundedWhileLoadingLayout()
    with Checkpoint(folders.plain("llama")) as checkpoint:
        weights = LoadedWeights(checkpoint, torch.float32, CPU)
        whole = layout.unpack(weights, module, 48, 40)
        of_inputs: tuple[Size, Size] = 48, Cut(40, (range(20, 40),))
        of_outputs: tuple[Size, Size] = Cut(48, (range(8, 16), range(40, 48))), 40
        narrow, short = (layout.unpack(weights, module, *sizes) for sizes in (of_inputs, of_outputs))
    assert whole is not None
    assert narrow is not None
    assert short is not None
    kept = [*range(8, 16), *range(40, 48)]
    assert torch.equal(narrow.codes.view(torch.uint8), whole.codes.view(torch.uint8)[20:40])
    assert torch.equal(narrow.scales, whole.scales)
    assert torch.equal(short.codes.view(torch.uint8), whole.codes.view(torch.uint8)[:, kept])
    assert torch.equal(short.scales, whole.scales[:, kept])


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_bytes_are_those_of_the_made_folder(family: str, folders: Folders) -> None:
    plain, made = folders.plain(family), folders.made(family)
    found = logits(plain, WeightFormat.FP8)
    assert torch.equal(found, logits(made, WeightFormat.FP8))
    assert not torch.allclose(found, logits(plain), rtol=1e-3), "the model in 16 bits"
    expected = [expected_weights(config_of(one, WeightFormat.FP8), torch.float32).num_bytes for one in (plain, made)]
    assert expected[0] == expected[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_compute_what_two_ranks_of_the_made_folder_compute(family: str, folders: Folders) -> None:
    plain, made = (
        on_ranks(2, partial(lambda folder, ranks: logits(folder, WeightFormat.FP8, ranks), folder))
        for folder in (folders.plain(family), folders.made(family))
    )
    assert torch.equal(plain, made)
    torch.testing.assert_close(plain, logits(folders.plain(family), WeightFormat.FP8), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("copies_bytes", [0, 1 << 24], ids=["packed", "dequantized"])
def test_an_engine_answers_as_that_of_the_made_folder(
    copies_bytes: int, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream_runtime.engine.kv.pool_size.copy_budget_bytes", lambda *sizes: copies_bytes)
    engines = [
        make_engine(folders.plain("llama"), quantization=WeightFormat.FP8),
        make_engine(folders.made("llama")),
        make_engine(folders.plain("llama"), quantization=WeightFormat.NONE, dtype=DType.FLOAT32),
    ]
    answers = [engine_answers(engine, PROMPTS, 12) for engine in engines]
    assert answers[0] == answers[1]
    assert engines[0].memory_use.weights_bytes == engines[1].memory_use.weights_bytes
    if not copies_bytes:
        assert engines[0].memory_use.weights_bytes < 0.6 * engines[2].memory_use.weights_bytes
    assert {one.computed_by for one in engines[0].linears} == {one.computed_by for one in engines[1].linears}
    assert not engines[2].linears, "None rounds nothing"


@pytest.fixture
def pair() -> Iterator[Leader]:
    leader = Leader(2, CPU)
    yield leader
    leader.close()


def test_two_processes_answer_as_one(folders: Folders, pair: Leader) -> None:
    config = RuntimeConfig(
        model=str(folders.plain("llama")),
        served_model_name="tiny",
        device=Device.CPU,
        quantization=WeightFormat.FP8,
        kv_cache_memory_bytes=2 << 20,
    )
    one = Engine(config, lambda phase, message: None)
    two = Engine(replace(config, tensor_parallel_size=2), lambda phase, message: None, rank_group=pair)
    assert engine_answers(two, PROMPTS, 8) == engine_answers(one, PROMPTS, 8)


def test_ready_says_that_it_was_rounded_while_loading(folders: Folders) -> None:
    def body(folder: Path, asked: WeightFormat | None) -> dict[str, object]:
        config = RuntimeConfig(model=str(folder), served_model_name="tiny", quantization=asked)
        linears, boot = make_engine(folder, quantization=asked).linears, BootLedger().snapshot()
        return ready_body(config, boot, topology=None, memory=None, linears=linears, now_seconds=0.0)

    rounded = body(folders.plain("llama"), WeightFormat.FP8)
    Readiness.model_validate(rounded)
    assert all(one["rounded_while_loading"] is True for one in rounded["linears"])  # type: ignore[attr-defined]
    assert "rounded_while_loading" not in json.dumps(body(folders.made("llama"), WeightFormat.FP8))


def test_no_more_than_one_module_is_held_in_the_files_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where each tensor is copied: what is allocated beyond the model is one module, not all of them."""
    monkeypatch.setattr(rounded_while_loading, "MOST_ELEMENTS", 1 << 13)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "head_dim": 64}
    write_family(tmp_path, dtype="bfloat16", **dense("llama", **sizes))

    class Copied(CheckedOnHost):
        def place(self, name: str, source: Tensor) -> Tensor:
            return super().place(name, source).clone()

    def load(config: ModelConfig, held: list[object]) -> None:
        placement = Copied(CPU)
        with Checkpoint(tmp_path) as checkpoint:
            layout_of = layouts_of(config)
            weights = LoadedWeights(checkpoint, torch.bfloat16, CPU, layout_of=layout_of, placement=placement)
            held.append(build_model(config, weights, placement))

    plain, rounded = config_of(tmp_path, None), config_of(tmp_path, WeightFormat.FP8)
    model_bytes, plain_bytes = (expected_weights(one, torch.bfloat16).num_bytes for one in (rounded, plain))
    load(rounded, [])  # what torch allocates once
    models: list[object] = []
    mapped_bytes = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))  # torch counts them as allocated
    most_bytes = peak_bytes(partial(load, rounded, models)) - mapped_bytes
    module_bytes = 512 * 256 * 2
    assert model_bytes < most_bytes < model_bytes + 3 * module_bytes, "its codes and some rows in float32 besides"
    assert model_bytes < 0.55 * plain_bytes


def test_other_formats_and_methods_are_refused_as_before(folders: Folders, tmp_path: Path) -> None:
    settings = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}
    quantized(folders.plain("llama"), tmp_path / "awq", settings, awq(16))
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    write_family(tmp_path / "plain", **dense("llama", **sizes))
    write_gguf(tmp_path / "plain", tmp_path / "gguf" / "model.gguf", lambda module: "Q8_0")
    cases: list[tuple[Path, WeightFormat, str]] = [
        (tmp_path / "awq", WeightFormat.FP8, "--quantization is FP8 (spec.quantization.method), but {} holds AWQ"),
        (tmp_path / "gguf", WeightFormat.FP8, "--quantization is FP8 (spec.quantization.method), but {} holds GGUF"),
        (folders.plain("llama"), WeightFormat.INT8, "--quantization is INT8 (spec.quantization.method), but {} holds"),
        (folders.made("llama"), WeightFormat.NONE, "--quantization is None (spec.quantization.method), but {} holds"),
    ]
    for folder, asked, said in cases:
        with pytest.raises(RuntimeFailure) as refused:
            config_of(folder, asked)
        assert refused.value.reason is FailureReason.INVALID_CONFIG
        assert refused.value.message.startswith(said.format(folder))


def test_a_gguf_file_of_16_bits_is_rounded_too(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    write_family(tmp_path / "plain", **dense("llama", **sizes))
    write_gguf(tmp_path / "plain", tmp_path / "gguf" / "model.gguf", lambda module: "F32")
    torch.testing.assert_close(
        logits(tmp_path / "gguf", WeightFormat.FP8), logits(tmp_path / "plain", WeightFormat.FP8), rtol=1e-4, atol=1e-4
    )


@pytest.mark.quick
def test_nothing_is_rounded_where_nothing_is_asked_for(folders: Folders) -> None:
    plain = load_model_config(folders.plain("llama"))
    assert config_of(folders.plain("llama"), None) == plain
    assert config_of(folders.plain("llama"), WeightFormat.NONE).quantization is None
