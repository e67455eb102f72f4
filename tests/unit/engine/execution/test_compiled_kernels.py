"""An engine that chose kernels starts each at its boot, from the image's folder, on a fake of CUDA's library."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.compiler

from hack.kernels.prebuild import prebuild
from millstream_kernels.prebuilt import cuda_library, install
from millstream_kernels.prebuilt.cuda_library import CudaLibrary
from millstream_kernels.prebuilt.folder import INDEX
from millstream_kernels.variants import VARIANTS
from millstream_runtime.config import KVCacheDType, RuntimeConfig
from millstream_runtime.engine.devices import device_policy_for
from millstream_runtime.engine.execution import compiled_kernels
from millstream_runtime.engine.execution.compiled_kernels import CompiledKernels, load_and_start
from millstream_runtime.engine.execution.forward import Forward
from millstream_runtime.engine.execution.kernel_choice import PARTS, backend_of, choose_kernels, layer_kernels
from millstream_runtime.engine.execution.shard import step_of_prompts
from millstream_runtime.engine.execution.shard_config import ShardConfig
from millstream_runtime.engine.kernel_backends import Backend, KernelChoice
from millstream_runtime.engine.kv.kv_cache import KVCache
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.models.arithmetic import Arithmetic
from millstream_runtime.models.layers.decoder import Decoder
from millstream_runtime.models.registry import load_model, load_model_config
from tests.support.engines import WriteModel
from tests.support.fake_cuda import FakeCuda, fake_device

pytestmark = pytest.mark.deep

KERNELS = {variant.kernel_name: variant.kernel for variant in VARIANTS}
CPU = torch.device("cpu")
SHAPE = {"hidden_size": 1088, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 64, "num_hidden_layers": 1}
ATTENTION = {"paged_decode", "combine_splits", "paged_prefill"}
PRODUCTS = {"w16a16_product", "sum_splits"}
LLAMA = {"rms_norm_row", "gated_tile", "rope_kv_write_heads"} | PRODUCTS | ATTENTION
# Variants: one of each kernel, and three more products (16 and 64 rows, of weights that are split and that are not);
# the sampler's, which describes logits of two types.
FOUND = len(LLAMA) + 3 + 3
CHOSEN = {*PARTS} - {"experts"}
SAMPLER = {"sample_row", "describe_row"}
OF_LAYERS = {"norm", "activation", "linear", "dense_linear", "rope_kv_write"}


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the kernels that these tests start."""
    path = tmp_path_factory.mktemp("image") / "kernels"
    wanted = [one for one in VARIANTS if one.kernel_name in LLAMA | SAMPLER and not is_of_others(one.name)]
    prebuild(path, variants=wanted)
    return path


def is_of_others(name: str) -> bool:
    return any(word in name for word in ("128", "256", "4096", "8192", "int8", "e4m3"))


@dataclass
class Boot:
    """A boot on a fake GPU."""

    run: Callable[..., tuple[KernelChoice, ...]]
    library: Callable[[], CudaLibrary]
    compute: Callable[[int, int], None] | None = None  # a step of prompts, after the boot: tokens, the longest prompt
    cuda: FakeCuda = field(default_factory=FakeCuda)
    kernels: CompiledKernels = field(default_factory=CompiledKernels)
    said: list[str] = field(default_factory=list)
    loads: int = 0

    @property
    def started(self) -> set[str]:
        return {launch.kernel for launch in self.cuda.launches}


@pytest.fixture
def boot(write_model: WriteModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[Boot]:
    """`run(folder, capability, parts, **model)`: what computes `parts` of a random Llama, with heads of 64."""
    dtype, cuda = torch.bfloat16, FakeCuda()
    made = Boot(lambda: (), lambda: CudaLibrary(cuda), cuda=cuda)

    def run(folder: Path, capability: int = 90, parts: Collection[str] = PARTS, **model: Any) -> Any:
        path = write_model(**(SHAPE | model))
        config = RuntimeConfig(model=str(path), served_model_name="test", max_num_batched_tokens=70)
        shape = load_model_config(path)
        monkeypatch.setenv("MILLSTREAM_KERNELS_DIR", str(folder))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: divmod(capability, 10))
        monkeypatch.setattr(install, "CudaLibrary", made.library)
        monkeypatch.setattr(install, "CudaDevice", lambda: fake_device(capability))
        monkeypatch.setattr(compiled_kernels, "_warn", made.said.append)

        def load(choices: tuple[KernelChoice, ...]) -> tuple[Decoder, tuple[KernelChoice, ...]]:
            made.loads += 1
            return load_model(shape, path, dtype, CPU, kernels=layer_kernels(choices, CPU, dtype)), choices

        chosen = choose_kernels(shape, CPU, dtype, KVCacheDType.AUTO, 16, Backend.TRITON)
        asked = tuple(one for one in chosen if one.part in parts)
        shard_config = ShardConfig(shape, CPU, Arithmetic.of(dtype), device_policy_for(CPU, 1))
        cache = KVCache(shape, 1, 16, dtype, CPU)
        decoder, choices = load_and_start(asked, load, cache, config, shard_config, made.kernels)
        forward = Forward(decoder, cache, shard_config.policy, backend=backend_of("attention", choices))

        @torch.inference_mode()
        def compute(num_tokens: int, longest: int) -> None:
            forward.logits(forward.residual(step_of_prompts(config, num_tokens, longest)), [0])

        made.compute = compute
        return choices

    made.run = run
    active, compile_kernel = triton.runtime.driver._active, triton.compiler.compile
    for kernel in KERNELS.values():
        kernel.device_caches.clear()
    yield made
    triton.runtime.driver._active, triton.compiler.compile = active, compile_kernel
    triton.compiler.compiler.max_shared_mem.cache_clear()
    for kernel in KERNELS.values():
        kernel.device_caches.clear()


@pytest.fixture
def no_ptxas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(triton.knobs.nvidia).__dict__["ptxas"], "default_path", "/nowhere/ptxas")


def of_torch(choices: tuple[KernelChoice, ...]) -> dict[str, str]:
    """Parts that torch computes, with the reason."""
    return {one.part: one.reason for one in choices if one.backend is Backend.TORCH}


@pytest.mark.usefixtures("no_ptxas")
def test_every_kernel_of_the_model_is_started_at_the_boot(boot: Boot, image: Path) -> None:
    assert of_torch(boot.run(image)) == {}
    assert boot.started == LLAMA | SAMPLER
    assert boot.kernels.counts() == {"found": FOUND, "compiled": 0}
    assert (boot.said, boot.loads) == ([], 1)
    assert of_torch(boot.run(image)) == {}, "another engine of this process"
    assert boot.kernels.counts() == {"found": FOUND, "compiled": 0}


@pytest.mark.usefixtures("no_ptxas")
def test_no_later_step_needs_a_kernel_that_the_boot_did_not_start(boot: Boot, image: Path) -> None:
    boot.run(image)
    found = boot.kernels.counts()
    assert boot.compute is not None
    for num_tokens in (2, 16, 33, 64, 70):
        for longest in (1, 7, 64):
            boot.compute(num_tokens, longest)
    assert boot.kernels.counts() == found


@pytest.mark.usefixtures("no_ptxas")
@pytest.mark.parametrize("lacking", ["rms_norm_row", "sample_row"])
def test_a_kernel_that_the_image_should_have_ends_the_boot_by_name(
    lacking: str, boot: Boot, image: Path, tmp_path: Path
) -> None:
    index = json.loads((image / INDEX).read_bytes())
    index["entries"] = [one for one in index["entries"] if one["kernel"] != lacking]
    with pytest.raises(RuntimeFailure) as failed:
        boot.run(copy_of(image, tmp_path, index=json.dumps(index).encode()))
    assert failed.value.reason is FailureReason.UNSUPPORTED_BY_RUNTIME
    assert failed.value.message == (
        f"The image lacks a compiled kernel: {lacking} for sm_90: no variant was compiled ahead; the kernel is not "
        "among them. Build the image anew, with `make images`."
    )
    assert boot.kernels.counts()["missing"] == 1


@pytest.mark.usefixtures("no_ptxas")
def test_a_gpu_that_is_not_in_the_table_is_served_by_torch(boot: Boot, image: Path) -> None:
    reasons = of_torch(boot.run(image, capability=100))
    assert reasons == dict.fromkeys(CHOSEN, "no kernel was compiled ahead for sm_100")
    assert (boot.cuda.launches, boot.loads) == ([], 1)


@pytest.mark.usefixtures("no_ptxas")
def test_layers_that_are_not_in_the_table_are_torchs_and_attention_is_not(boot: Boot, image: Path) -> None:
    reasons = of_torch(boot.run(image, hidden_size=64))
    assert reasons.keys() == OF_LAYERS
    assert all(reason.startswith("rms_norm_row for sm_90: no variant was compiled") for reason in reasons.values())
    assert boot.started == ATTENTION | SAMPLER
    assert boot.loads == 2
    assert boot.said == [f"{reasons['norm']}; the weights are read again, for torch"]


@pytest.mark.usefixtures("no_ptxas")
def test_without_ptxas_what_is_damaged_is_served_by_torch(boot: Boot, image: Path, tmp_path: Path) -> None:
    reasons = of_torch(boot.run(copy_of(image, tmp_path, cubin=b"x")))
    assert reasons.keys() == CHOSEN
    assert all("is damaged: its SHA-256 is not the one in index.json; it cannot" in one for one in reasons.values())
    assert boot.cuda.launches == []
    assert boot.kernels.counts() == {"damaged": 3, "compiled": 0}, "one of the layers, of attention, the sampler's"


@pytest.mark.usefixtures("no_ptxas")
def test_without_ptxas_a_damaged_index_is_served_by_torch(boot: Boot, image: Path, tmp_path: Path) -> None:
    reasons = of_torch(boot.run(copy_of(image, tmp_path, index=b"{")))
    assert reasons.keys() == CHOSEN
    assert all(re.search("is damaged: .*, and there is no ptxas to compile them", one) for one in reasons.values())
    assert boot.loads == 1


def copy_of(image: Path, copy: Path, **damaged: bytes) -> Path:
    """`damaged`: by the ending of a file, and the index."""
    for path in image.iterdir():
        (copy / path.name).write_bytes(damaged.get(path.suffix[1:], path.read_bytes()))
    (copy / INDEX).write_bytes(damaged.get("index", (image / INDEX).read_bytes()))
    return copy


def test_where_no_folder_is_kernels_are_compiled_at_the_boot(
    boot: Boot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    assert of_torch(boot.run(tmp_path / "none", parts={"sampler"})) == {}
    assert boot.kernels.counts() == {"missing": 3, "compiled": 3}
    assert boot.started == SAMPLER
    of_folder, *of_kernels = boot.said
    assert of_folder.endswith("; kernels are compiled when they are first started")
    assert all(one.endswith("; it is compiled now") for one in of_kernels)


def test_without_a_driver_torch_computes(boot: Boot, image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_library, "LIBRARY", "libcuda-none.so.1")
    boot.library = CudaLibrary
    reasons = of_torch(boot.run(image))
    assert reasons.keys() == CHOSEN
    assert all(one.startswith("libcuda-none.so.1 cannot be loaded: ") for one in reasons.values())
