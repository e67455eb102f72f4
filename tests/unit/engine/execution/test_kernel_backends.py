"""The engine with Triton's kernels, in the interpreter: torch's tokens, one result for one row, and reasons."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from millstream_kernels.tuning import table
from millstream_runtime.config import KVCacheDType
from millstream_runtime.engine import assembly
from millstream_runtime.engine.cpu import compiled_code
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.execution import kernel_choice, model_loading, rank_kernels
from millstream_runtime.engine.execution.execution_mode import Execution
from millstream_runtime.engine.execution.kernel_choice import (
    ATTENTION_PARTS,
    PARTS,
    after_loading,
    choose_kernels,
    layer_kernels,
)
from millstream_runtime.engine.kernel_backends import Backend, KernelChoice
from millstream_runtime.engine.request import Request, SamplingParams, TokenLogprobs
from millstream_runtime.models.layers.triton_layers import TritonLayers
from millstream_runtime.models.registry import load_model_config
from millstream_runtime.quantization.gpu.kernel_check import KernelCheck
from millstream_runtime.quantization_config.scheme import read_scheme
from tests.support.eager_recorder import EagerRecorder
from tests.support.engines import MakeEngine, WriteModel, generate, greedy
from tests.support.family_cases import MLA, dense
from tests.support.kernel_launches import Launch, recording_launches
from tests.support.quantized_checkpoints import awq, quantized
from tests.support.tiny_families import prompts_of, with_fields, write_family
from tests.support.triton_interpreter import interpreting
from tests.unit.quantization.test_cpu_products import grouped

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.deep]
NEW_TOKENS = 6
CPU = torch.device("cpu")


@pytest.fixture
def interpreter() -> Iterator[None]:
    with interpreting():
        yield


@pytest.fixture
def launches(interpreter: None) -> Iterator[list[Launch]]:
    with recording_launches() as recorded:
        yield recorded


@pytest.fixture
def attention_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """All else is torch's: interpreting one program per row of a prompt takes seconds."""
    monkeypatch.setattr(rank_kernels, "layer_kernels", lambda *chosen: None)
    monkeypatch.setattr(assembly, "sampler_kernels", lambda choices: None)


@pytest.fixture
def folder(write_model: WriteModel) -> Path:
    return write_model(hidden_size=64)


def only(**parts: Any) -> TritonLayers:
    """Kernels for these parts of layers alone."""
    none = TritonLayers(norms=False, activations=False, linears=False, rotates=False, experts=False)
    return replace(none, **parts)


def requests(sampling: SamplingParams) -> list[Request]:
    prompts = prompts_of((1, 16, 40, 40, 61))
    prompts[3] = [*prompts[2][:33], *prompts[3][:9]]  # blocks in common
    return [Request(str(index), prompt, sampling) for index, prompt in enumerate(prompts)]


TRITON = Execution(backend=Backend.TRITON)
GREEDY = greedy(NEW_TOKENS)
QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
SEEDED = SamplingParams(NEW_TOKENS, temperature=0.9, top_k=40, top_p=0.95, seed=7, ignore_eos=True)


@pytest.mark.usefixtures("attention_alone")
@pytest.mark.parametrize(
    ("sampling", "config"),
    [
        (GREEDY, {}),
        (GREEDY, {"max_num_batched_tokens": 20}),
        (SEEDED, {"enable_prefix_caching": False}),
    ],
    ids=["together", "in chunks", "seeded, without a cache"],
)
def test_the_engine_answers_with_torchs_tokens(
    sampling: SamplingParams, config: dict[str, Any], folder: Path, make_engine: MakeEngine, launches: list[Launch]
) -> None:
    expected = generate(make_engine(folder), requests(sampling))
    assert not launches
    engine = make_engine(folder, execution=TRITON, **config)
    assert generate(engine, requests(sampling)) == expected
    assert {launch.kernel for launch in launches} == {"paged_prefill", "paged_decode", "combine_splits"}
    again = generate(engine, [replace(one, request_id=f"again-{one.request_id}") for one in requests(sampling)])
    assert [*again.values()] == [*expected.values()]


def test_norms_gates_and_products_of_4_bits_answer_alike(
    write_model: WriteModel, make_engine: MakeEngine, launches: list[Launch], tmp_path: Path
) -> None:
    packed = tmp_path / "packed"
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    quantized(write_model(hidden_size=64, intermediate_size=96), packed, settings, awq(32))
    few = [Request(str(index), prompt, greedy(2)) for index, prompt in enumerate(prompts_of((1, 3)))]
    expected = generate(make_engine(packed), few)
    assert not launches
    assert generate(make_engine(packed, execution=TRITON), few) == expected
    assert {launch.kernel for launch in launches} > {"rms_norm_row", "gated_tile", "w4a16_product", "sum_splits"}


@pytest.mark.parametrize("config", [{}, {"kv_cache_dtype": KVCacheDType.INT8}], ids=["numbers", "int8"])
def test_rotations_and_writes_into_the_pool_answer_alike(
    config: dict[str, Any],
    tmp_path: Path,
    make_engine: MakeEngine,
    launches: list[Launch],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "qwen3"  # norms of heads
    write_family(folder, **QWEN3)
    few = [Request(str(index), prompt, greedy(3)) for index, prompt in enumerate(prompts_of((1, 9, 18)))]
    expected = generate(make_engine(folder, **config), few)
    assert not launches
    monkeypatch.setattr(rank_kernels, "layer_kernels", lambda *chosen: only(rotates=True))
    monkeypatch.setattr(model_loading, "backend_of", lambda part, choices: Backend.TORCH)  # of attention
    assert generate(make_engine(folder, execution=TRITON, **config), few) == expected
    assert {launch.kernel for launch in launches} == {"rope_kv_write_heads"}


def test_experts_answer_alike_and_read_nothing_back(
    tmp_path: Path, make_engine: MakeEngine, launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "experts"
    write_family(folder, **dense("deepseek_v3", **MLA | {"num_hidden_layers": 1, "first_k_dense_replace": 0}))
    few = [Request(str(index), prompt, greedy(3)) for index, prompt in enumerate(prompts_of((1, 9)))]
    expected = generate(make_engine(folder), few)
    assert not launches
    monkeypatch.setattr(rank_kernels, "layer_kernels", lambda *chosen: only(experts=True))
    engine = make_engine(folder, execution=TRITON)
    assert generate(engine, few) == expected
    kernels = {"route_token", "count_assignments", "place_assignments", "expert_product", "combine_row"}
    assert {launch.kernel for launch in launches} == kernels
    reasons = {one.part: one.reason for one in engine.kernels if one.backend is Backend.TORCH}
    latent = "a latent of 20 + 8: multiples of 16 up to 512 + 64 are supported"
    assert reasons == dict.fromkeys(ATTENTION_PARTS, latent) | {"rope_kv_write": "heads share a latent key (MLA)"}


@pytest.mark.usefixtures("attention_alone")
@pytest.mark.parametrize("stored", KVCacheDType)
def test_a_model_with_latent_attention_answers_alike(
    stored: KVCacheDType, tmp_path: Path, make_engine: MakeEngine, launches: list[Launch]
) -> None:
    folder = tmp_path / "latent"
    sizes = MLA | {"num_hidden_layers": 1, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "head_dim": 16}
    write_family(folder, **dense("deepseek_v3", **sizes))
    few = [Request(str(index), prompt, greedy(3)) for index, prompt in enumerate(prompts_of((1, 40, 18)))]
    expected = generate(make_engine(folder, kv_cache_dtype=stored), few)
    assert not launches
    for execution in (TRITON, Execution(EagerRecorder(), backend=Backend.TRITON)):
        engine = make_engine(folder, execution=execution, kv_cache_dtype=stored)
        assert generate(engine, few) == expected
        if stored is KVCacheDType.AUTO:
            assert {launch.kernel for launch in launches} == {"mla_rows", "combine_splits"}
            continue
        assert not launches
        reasons = {one.part: one.reason for one in engine.kernels if one.backend is Backend.TORCH}
        assert reasons.items() >= dict.fromkeys(ATTENTION_PARTS, f"latents are stored as {stored.value}").items()


def test_a_seed_draws_torchs_tokens(
    folder: Path, make_engine: MakeEngine, launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a top_p, which torch draws otherwise on a CPU than on a GPU (`engine.sampling.draw`)."""
    penalised = replace(SEEDED, top_p=1.0, top_k=0, min_p=0.01, presence_penalty=0.5, seed=2**64 - 3)
    asked = [replace(SEEDED, top_p=1.0), penalised, GREEDY, replace(SEEDED, temperature=0.0, logit_bias=((3, 9.0),))]
    few = [Request(str(index), [7, 8, index], one) for index, one in enumerate(asked)]
    expected = generate(make_engine(folder), few)
    assert not launches
    monkeypatch.setattr(rank_kernels, "layer_kernels", lambda *chosen: None)
    monkeypatch.setattr(model_loading, "backend_of", lambda part, choices: Backend.TORCH)
    assert generate(make_engine(folder, execution=TRITON), few) == expected
    assert {launch.kernel for launch in launches} == {"sample_row"}


def test_log_probabilities_are_torchs(
    folder: Path, make_engine: MakeEngine, launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prompt and answer, from the logits before penalties."""
    asked = replace(SEEDED, max_tokens=2, top_p=1.0, presence_penalty=1.0, logprobs=3, prompt_logprobs=1)
    prompt = Request("0", [7, 8, 7, 9], asked)
    expected = described(make_engine(folder), prompt)
    assert not launches
    monkeypatch.setattr(rank_kernels, "layer_kernels", lambda *chosen: None)
    monkeypatch.setattr(model_loading, "backend_of", lambda part, choices: Backend.TORCH)
    found = described(make_engine(folder, execution=TRITON), prompt)
    assert {launch.kernel for launch in launches} == {"sample_row", "describe_row"}
    assert len(found) == len(expected) == 5
    for one, other in zip(found, expected, strict=True):
        assert (one.token_id, one.rank, [token for token, _ in one.top]) == (
            other.token_id,
            other.rank,
            [token for token, _ in other.top],
        )
        values = [other.logprob, *(value for _, value in other.top)]
        assert [one.logprob, *(value for _, value in one.top)] == pytest.approx(values, abs=1e-5)


def described(engine: Engine, request: Request) -> list[TokenLogprobs]:
    """Of all tokens but the first."""
    engine.add_request(request)
    found: list[TokenLogprobs] = []
    while engine.has_work():
        for output in engine.step():
            if output.prefill is not None and output.prefill.prompt_logprobs is not None:
                found += [one for one in output.prefill.prompt_logprobs if one is not None]
            if output.logprobs is not None:
                found.append(output.logprobs)
    return found


@pytest.mark.usefixtures("attention_alone")
def test_steps_that_a_graph_replays_answer_alike(folder: Path, make_engine: MakeEngine, launches: list[Launch]) -> None:
    expected = generate(make_engine(folder), requests(GREEDY))
    engine = make_engine(folder, execution=Execution(EagerRecorder(), backend=Backend.TRITON))
    assert generate(engine, requests(GREEDY)) == expected
    assert engine.graphs is not None
    assert engine.graphs.replayed_steps > 0
    assert "paged_decode" in {launch.kernel for launch in launches}


@pytest.mark.usefixtures("attention_alone")
@pytest.mark.parametrize("stored", [KVCacheDType.INT8, KVCacheDType.FP8])
def test_keys_and_values_in_8_bits_are_read_as_torch_reads_them(
    stored: KVCacheDType, folder: Path, make_engine: MakeEngine, launches: list[Launch]
) -> None:
    """Eagerly and replayed; prompts with cached prefixes."""
    config = {"kv_cache_dtype": stored}
    expected = generate(make_engine(folder, **config), requests(GREEDY))
    assert not launches
    for execution in (TRITON, Execution(EagerRecorder(), backend=Backend.TRITON)):
        launches.clear()
        engine = make_engine(folder, execution=execution, **config)
        assert generate(engine, requests(GREEDY)) == expected
        assert engine.stats().prefix_cache_hit_tokens_total > 0
        pools = {launch.arguments["pool"] for launch in launches if "pool" in launch.arguments}
        assert pools == {"*i8" if stored is KVCacheDType.INT8 else "*u8"}
        assert {launch.kernel for launch in launches} == {"paged_prefill", "paged_decode", "combine_splits"}


@pytest.mark.usefixtures("attention_alone")
def test_a_model_with_windows_answers_alike(
    write_model: WriteModel, make_engine: MakeEngine, launches: list[Launch], tmp_path: Path
) -> None:
    folder = windowed(write_model(hidden_size=64), tmp_path / "windowed")
    expected = generate(make_engine(folder), requests(GREEDY))
    for execution in (TRITON, Execution(EagerRecorder(), backend=Backend.TRITON)):
        launches.clear()
        assert generate(make_engine(folder, execution=execution), requests(GREEDY)) == expected
        assert any(launch.constants.get("HAS_WINDOW") for launch in launches)


def windowed(folder: Path, copy: Path) -> Path:
    """A Llama's weights as a Mistral with a sliding window."""
    return with_fields(
        folder, copy, model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=24, head_dim=16
    )


@pytest.mark.quick
def test_what_was_chosen_is_said_with_the_reason(folder: Path, make_engine: MakeEngine) -> None:
    choices = make_engine(folder).kernels
    compiled, held, others = choices[:5], choices[5], choices[6:]
    parts = ["decode_attention", "prompt_attention", "rope_kv_write", "norm", "activation"]
    assert [one.part for one in compiled] == parts
    assert {(one.backend, one.reason) for one in compiled} == {(Backend.NUMBA, "the kernel takes this model")}
    assert (held.part, held.backend) == ("dense_linear", Backend.TORCH)
    assert held.reason.startswith("weights and products are float32")
    left = {"experts", *(one.part for one in (*compiled, held))}
    assert [one.part for one in others] == [part for part in PARTS if part not in left]
    assert {one.backend for one in others} == {Backend.TORCH}
    assert {one.reason for one in others} == {"kernels run on GPUs, and this engine computes on a CPU"}
    asked = make_engine(folder, execution=TRITON).kernels
    assert {(one.backend, one.reason) for one in asked} == {(Backend.TRITON, "the kernels take this model")}


@pytest.mark.quick
def test_an_engine_without_its_compiled_kernels_says_so_in_the_log_and_in_ready(
    folder: Path, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled_code, "load", lambda: (None, "no kernels are compiled for a CPU: index.json"))
    with caplog.at_level("WARNING"):
        kernels = make_engine(folder).kernels  # what `/ready` shows
    (warning,) = (record for record in caplog.records if record.getMessage() == "no_compiled_kernels")
    assert warning.fields == {  # type: ignore[attr-defined]
        "problem": "no kernels are compiled for a CPU: index.json",
        "effect": "torch computes in their place, slower",
    }
    assert {choice.reason for choice in kernels[:5]} == {"no kernels are compiled for a CPU: index.json"}


def test_attention_that_the_kernels_do_not_take_is_torchs(
    write_model: WriteModel, make_engine: MakeEngine, attention_alone: None
) -> None:
    engine: Engine = make_engine(write_model(), execution=TRITON)  # heads of 12
    reasons = {one.part: one.reason for one in engine.kernels if one.backend is Backend.TORCH}
    wanted = "head size 12: multiples of 16 up to 256 are supported"
    assert reasons == dict.fromkeys(("attention", "static_decode", "rope_kv_write"), wanted)
    assert generate(engine, requests(GREEDY)) == generate(make_engine(write_model()), requests(GREEDY))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"block_size_tokens": 24}, "blocks of 24 tokens: a power of two is supported"),
        ({"dtype": torch.float64}, "dtype float64"),
        ({"asked": None}, "kernels run on GPUs, and this engine computes on a CPU"),
        ({"asked": Backend.TORCH}, "it was asked for"),
    ],
)
def test_a_reason_names_what_is_not_supported(change: dict[str, Any], reason: str, folder: Path) -> None:
    arguments: dict[str, Any] = {
        "device": CPU,
        "dtype": torch.bfloat16,
        "stored": KVCacheDType.AUTO,
        "block_size_tokens": 16,
        "asked": Backend.TRITON,
    }
    choices = choose_kernels(load_model_config(folder), **(arguments | change))
    of_attention = choices[: len(ATTENTION_PARTS)]
    assert {choice.reason for choice in of_attention} == {reason}
    assert {choice.backend for choice in of_attention} == {Backend.TORCH}
    of_others = {choice.backend for choice in choices[len(ATTENTION_PARTS) :]}
    assert of_others == {Backend.TRITON if "block_size_tokens" in change else Backend.TORCH}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("capability", "reason"),
    [((7, 5), "the GPU is sm_75; kernels need sm_80"), ((9, 0), "no kernel was measured on sm_90 yet")],
)
def test_a_gpu_has_a_reason_too(
    capability: tuple[int, int], reason: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    config = load_model_config(folder)
    choices = choose_kernels(config, torch.device("cuda", 0), torch.bfloat16, KVCacheDType.AUTO, 16)
    assert {choice.reason for choice in choices} == {reason}


@pytest.mark.quick
def test_a_tuning_table_that_cannot_be_used_leaves_all_to_torch(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(table, "FOLDER", tmp_path)
    monkeypatch.setattr(table, "_tables", {})
    (tmp_path / "sm_80.json").write_text("{")
    choices = choose_kernels(load_model_config(folder), CPU, torch.bfloat16, KVCacheDType.AUTO, 16, Backend.TRITON)
    assert {(one.backend, one.reason) for one in choices} == {(Backend.TORCH, "tuning table sm_80.json: is no JSON")}


@pytest.mark.quick
def test_a_measured_gpu_uses_the_kernels_in_16_bits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernel_choice, "MEASURED_CAPABILITIES", frozenset({90}))
    config, device = load_model_config(folder), torch.device("cuda", 0)
    choices = kernel_choice.choose_kernels(config, device, torch.bfloat16, KVCacheDType.AUTO, 16)
    assert {choice.backend for choice in choices} == {Backend.TRITON}
    (reason,) = {one.reason for one in choose_kernels(config, device, torch.float32, KVCacheDType.AUTO, 16)}
    assert reason == "float32 has no matrix instruction on a GPU"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("capability", "dtype", "backend", "reason"),
    [
        ((8, 0), torch.bfloat16, Backend.TRITON, "the kernels take this model"),
        ((9, 0), torch.float16, Backend.TRITON, "the kernels take this model"),
        ((7, 5), torch.float16, Backend.TORCH, "the GPU is sm_75; kernels need sm_80"),
        ((9, 0), torch.float32, Backend.TORCH, "float32 has no matrix instruction on a GPU"),
    ],
)
def test_products_by_quantized_weights_need_no_measurement(
    capability: tuple[int, int],
    dtype: torch.dtype,
    backend: Backend,
    reason: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    scheme = read_scheme({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}, "config.json")
    config, device = replace(load_model_config(folder), quantization=scheme), torch.device("cuda", 0)
    choices = choose_kernels(config, device, dtype, KVCacheDType.AUTO, 16)
    assert [one for one in choices if one.part == "linear"] == [KernelChoice("linear", backend, reason)]
    assert {one.backend for one in choices if one.part != "linear"} == {Backend.TORCH}
    layers = layer_kernels(choices, device, dtype)
    assert (layers is None) == (backend is Backend.TORCH)
    asked = choose_kernels(config, device, dtype, KVCacheDType.AUTO, 16, Backend.TORCH)
    assert {one.reason for one in asked} == {"it was asked for"}


@pytest.mark.quick
def test_what_a_weight_showed_is_told() -> None:
    """As `/ready` shows it."""
    norm = KernelChoice("norm", Backend.TORCH, "no kernel was measured on sm_90 yet")
    choices = (norm, KernelChoice("linear", Backend.TRITON, "the kernels take this model"))
    check = KernelCheck(torch.float32, lambda linear, weight, dtype: "its product of 17 rows is not that of the weight")
    layers = replace(only(linears=True), check=check)
    assert after_loading(choices, layers) == choices
    weight, _ = grouped(4, (64, 32), 32)
    assert layers.packed_linear(weight, None) is None
    refused = KernelChoice("linear", Backend.TORCH, "its product of 17 rows is not that of the weight")
    assert after_loading(choices, layers) == (norm, refused)
    assert after_loading(choices, None) == choices
