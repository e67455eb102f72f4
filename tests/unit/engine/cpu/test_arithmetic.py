"""What `--dtype` means on a CPU, and what engines that hold weights in 16 bits answer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from millstream.commands.serve import config_of, parse_command_line
from millstream_kernels.cpu.bfloat16 import check as bfloat16_check
from millstream_kernels.cpu.bfloat16.product import Bfloat16Product
from millstream_runtime.config import Device, DType, RuntimeConfig, SpeculationMethod
from millstream_runtime.config_files import dump
from millstream_runtime.engine.cpu import compiled_code
from millstream_runtime.engine.execution.shard_config import draft_arithmetic, resolve_shard_config, weights_reason
from millstream_runtime.engine.request import Request
from millstream_runtime.models.arithmetic import Arithmetic
from millstream_runtime.models.registry import load_model_config
from tests.support.bfloat16_operations import ExactOperations
from tests.support.engines import MakeEngine, generate, greedy
from tests.support.tiny_model import write_tiny_model

DEMO_MODEL = Path(__file__).resolve().parents[4] / "models" / "demo-chat"
FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
HELD = Arithmetic(FLOAT32, BFLOAT16, FLOAT32)
ROUNDED = Arithmetic(FLOAT32, BFLOAT16, BFLOAT16, rounds_products=True)
needs_code = pytest.mark.skipif(compiled_code.load()[0] is None, reason="no kernels are compiled for this machine")


@pytest.fixture(autouse=True)
def _avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(bfloat16_check, "load", lambda: (None, "the CPU lacks AVX512_BF16 and AMX"))


@pytest.fixture
def _has_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that multiplies bfloat16 numbers; such have AVX-512, too."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(bfloat16_check, "load", lambda: (Bfloat16Product(ExactOperations(), 1, 2), None))


def resolved(folder: Path, dtype: DType = DType.AUTO, auto_dtype: DType | None = None) -> tuple[Arithmetic, str]:
    config = RuntimeConfig(
        model=str(folder), served_model_name="m", device=Device.CPU, dtype=dtype, auto_dtype=auto_dtype
    )
    shard_config = resolve_shard_config(config)
    return shard_config.arithmetic, weights_reason(config, shard_config)


@needs_code
@pytest.mark.parametrize(
    ("stored", "asked", "held", "why"),
    [
        ("bfloat16", DType.AUTO, BFLOAT16, "--dtype is auto, and the checkpoint is bfloat16"),
        ("float16", DType.AUTO, FLOAT16, "--dtype is auto, and the checkpoint is float16"),
        ("float32", DType.AUTO, FLOAT32, "weights and products are float32: --dtype is auto"),
        ("bfloat16", DType.FLOAT32, FLOAT32, "weights and products are float32: --dtype is float32"),
        ("float32", DType.BFLOAT16, BFLOAT16, "weights are held in bfloat16, and products and activations are"),
        ("bfloat16", DType.FLOAT16, FLOAT16, "--dtype is float16"),
    ],
)
def test_weights_are_held_as_the_flag_or_the_checkpoint_says_and_all_else_is_float32(
    stored: str, asked: DType, held: torch.dtype, why: str, tmp_path: Path
) -> None:
    arithmetic, reason = resolved(write_tiny_model(tmp_path, torch_dtype=stored), asked)
    assert arithmetic == Arithmetic(FLOAT32, held, FLOAT32)
    assert why in reason


@needs_code
def test_auto_is_float32_where_products_in_float32_have_wider_vectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    folder = write_tiny_model(tmp_path, torch_dtype="bfloat16")
    arithmetic, reason = resolved(folder)
    assert arithmetic == Arithmetic.of(FLOAT32)
    assert "use AVX-512 here" in reason
    arithmetic, reason = resolved(folder, DType.BFLOAT16)
    assert arithmetic == HELD, "it is held so where it is asked for"
    assert reason == (
        "weights are held in bfloat16, and products and activations are float32: --dtype is bfloat16; the CPU lacks "
        "AVX512_BF16 and AMX; prompts and large batches take up to twice as long as by --dtype float32, which takes "
        "twice the memory"
    )
    config = RuntimeConfig(model=str(folder), served_model_name="m", device=Device.CPU, dtype=DType.BFLOAT16)
    target = resolve_shard_config(config)
    assert draft_arithmetic(config, target, target.model_config).weights is BFLOAT16, "and so is its draft"


@needs_code
@pytest.mark.usefixtures("_has_product")
@pytest.mark.parametrize(
    ("stored", "asked", "arithmetic"),
    [
        ("bfloat16", DType.AUTO, ROUNDED),
        ("bfloat16", DType.BFLOAT16, ROUNDED),
        ("bfloat16", DType.FLOAT32, Arithmetic.of(FLOAT32)),
        ("float16", DType.AUTO, Arithmetic.of(FLOAT32)),  # as on every CPU with AVX-512
        ("float16", DType.FLOAT16, Arithmetic(FLOAT32, FLOAT16, FLOAT32)),
        ("float32", DType.AUTO, Arithmetic.of(FLOAT32)),
        ("float32", DType.BFLOAT16, ROUNDED),
    ],
)
def test_a_product_of_bfloat16_is_used_for_weights_that_are_so(
    stored: str, asked: DType, arithmetic: Arithmetic, tmp_path: Path
) -> None:
    found, reason = resolved(write_tiny_model(tmp_path, torch_dtype=stored), asked)
    assert found == arithmetic
    assert ("(oneDNN)" in reason) == arithmetic.rounds_products
    if (stored, asked) == ("float16", DType.AUTO):
        assert reason.endswith("which those of 16-bit weights do not yet")


@needs_code
@pytest.mark.usefixtures("_has_product")
def test_a_boot_file_that_says_nothing_stays_float32_where_there_is_a_product(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, torch_dtype="bfloat16")
    assert resolved(folder, auto_dtype=DType.FLOAT32)[0] == Arithmetic.of(FLOAT32)


@needs_code
def test_a_product_that_failed_its_check_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = "oneDNN's bfloat16 product failed its check: an infinity is lost"
    monkeypatch.setattr(bfloat16_check, "load", lambda: (None, problem))
    arithmetic, reason = resolved(write_tiny_model(tmp_path, torch_dtype="bfloat16"))
    assert arithmetic == HELD
    assert reason == (
        "weights are held in bfloat16, and products and activations are float32: "
        f"--dtype is auto, and the checkpoint is bfloat16; {problem}"
    )
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    arithmetic, reason = resolved(tmp_path)
    assert arithmetic == Arithmetic.of(FLOAT32)
    assert problem in reason


def test_without_the_kernel_weights_are_float32_and_the_reason_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_code, "load", lambda: (None, "the CPU lacks avx2"))
    arithmetic, reason = resolved(write_tiny_model(tmp_path, torch_dtype="bfloat16"), DType.BFLOAT16)
    assert arithmetic == Arithmetic.of(FLOAT32)
    assert reason == "weights are held in float32: --dtype is bfloat16, but the CPU lacks avx2"


@needs_code
@pytest.mark.parametrize(
    ("in_file", "flags", "held"),
    [
        (DType.AUTO, [], FLOAT32),  # what every release before this one wrote, and computed so
        (DType.AUTO, ["--dtype=auto"], BFLOAT16),
        (DType.BFLOAT16, [], BFLOAT16),
        (DType.FLOAT32, [], FLOAT32),
    ],
)
def test_auto_of_a_boot_file_stays_float32(in_file: DType, flags: list[str], held: torch.dtype, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", torch_dtype="bfloat16")
    boot = RuntimeConfig(model=str(folder), served_model_name="m", device=Device.CPU, dtype=in_file).boot
    (tmp_path / "boot.json").write_text(dump(boot))
    config = config_of(parse_command_line([f"--config={tmp_path / 'boot.json'}", *flags]))
    assert resolve_shard_config(config).arithmetic == Arithmetic(FLOAT32, held, FLOAT32)
    assert config.config_hash() == boot.config_hash(), "the operator knows the pod by the hash of what it wrote"


@needs_code
def test_flags_without_a_file_follow_the_checkpoint(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, torch_dtype="bfloat16")
    config = config_of(parse_command_line([f"--model={folder}", "--device=cpu"]))
    assert resolve_shard_config(config).arithmetic == HELD


@needs_code
@pytest.mark.parametrize(
    ("asked", "auto_dtype", "held"),
    [
        (DType.AUTO, None, FLOAT16),
        (DType.BFLOAT16, None, FLOAT16),
        (DType.FLOAT32, None, FLOAT32),
        (DType.AUTO, DType.FLOAT32, FLOAT32),
    ],
)
def test_a_draft_model_follows_its_own_checkpoint(
    asked: DType, auto_dtype: DType | None, held: torch.dtype, tmp_path: Path
) -> None:
    target = write_tiny_model(tmp_path / "target", torch_dtype="bfloat16")
    draft = load_model_config(write_tiny_model(tmp_path / "draft", torch_dtype="float16"))
    config = RuntimeConfig(
        model=str(target), served_model_name="m", device=Device.CPU, dtype=asked, auto_dtype=auto_dtype
    )
    assert draft_arithmetic(config, resolve_shard_config(config), draft) == Arithmetic(FLOAT32, held, FLOAT32)


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """See `one_thread`; the test of threads sets its own."""


@needs_code
@pytest.mark.parametrize("threads", [1, 2])
def test_an_answer_has_the_same_tokens_alone_in_company_and_in_chunks(
    threads: int, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
    torch.set_num_threads(threads)
    settings = {"enable_prefix_caching": False, "kv_cache_memory_bytes": 32 << 20}
    engine, cut = (make_engine(DEMO_MODEL, **settings, max_num_batched_tokens=budget) for budget in (2048, 32))
    requests = [Request(str(index), [3 + index] * (5 + 17 * index), greedy(12)) for index in range(8)]
    together = generate(engine, requests)
    assert generate(cut, requests) == together
    for request in requests:
        assert generate(engine, [request]) == {request.request_id: together[request.request_id]}


@needs_code
def test_drafts_change_no_token_where_both_models_are_held_in_16_bits(make_engine: MakeEngine) -> None:
    draft = DEMO_MODEL.with_name("demo-draft")
    requests = [Request(str(index), [3 + index] * (5 + 9 * index), greedy(24)) for index in range(4)]
    plain = make_engine(DEMO_MODEL, kv_cache_memory_bytes=32 << 20)
    drafted = make_engine(
        DEMO_MODEL,
        kv_cache_memory_bytes=32 << 20,
        speculation_method=SpeculationMethod.DRAFT_MODEL,
        draft_model=str(draft),
    )
    assert generate(drafted, requests) == generate(plain, requests)


@needs_code
def test_ready_says_how_weights_are_held(make_engine: MakeEngine) -> None:
    engine = make_engine(DEMO_MODEL, kv_cache_memory_bytes=32 << 20)
    [choice] = [one for one in engine.kernels if one.part == "dense_linear"]
    assert choice.backend.value == "numba"
    assert choice.reason.startswith("weights are held in bfloat16, and products and activations are float32: ")
    [exact] = [
        one
        for one in make_engine(DEMO_MODEL, kv_cache_memory_bytes=32 << 20, dtype=DType.FLOAT32).kernels
        if one.part == "dense_linear"
    ]
    assert exact.reason == "weights and products are float32: --dtype is float32"
