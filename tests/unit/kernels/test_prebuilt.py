"""Kernels compiled ahead are what launches look for, and start without a compiler, on a fake of CUDA's library."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

import millstream_kernels.attention.prefill
import millstream_kernels.linear.nf4
import millstream_kernels.linear.w4a16
import millstream_kernels.linear.w8a8
import millstream_kernels.linear.w8a16
import millstream_kernels.linear.w16a16
from hack.kernels.prebuild import prebuild
from hack.kernels.store import compile_all
from millstream_kernels.arguments import capability_of
from millstream_kernels.attention.decode import paged_decode
from millstream_kernels.elementwise.gated_activation import Activation, gated_activation, gated_tile
from millstream_kernels.prebuilt.cuda_library import CudaError, CudaLibrary
from millstream_kernels.prebuilt.folder import INDEX, PrebuiltError, PrebuiltFolder
from millstream_kernels.prebuilt.install import install
from millstream_kernels.prebuilt.key import compiled_for
from millstream_kernels.prebuilt.lookup import Lookup, MissingKernelError, Result
from millstream_kernels.variants import VARIANTS
from tests.support.fake_cuda import FAKE_STREAM, FakeCuda, fake_device
from tests.support.variant_calls import start

pytestmark = pytest.mark.deep

KERNELS = {variant.kernel_name: variant.kernel for variant in VARIANTS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the image brings; compiled only where the cache lacks it."""
    path = tmp_path_factory.mktemp("prebuilt") / "kernels"
    prebuild(path)
    return path


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither a C compiler nor ptxas can be started, and Triton's own cache cannot be written."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for tool in ("ptxas", "ptxas_blackwell"):
        monkeypatch.setattr(type(triton.knobs.nvidia).__dict__[tool], "default_path", str(tmp_path / "no-ptxas"))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/proc/no-cache")
    monkeypatch.delenv("CC", raising=False)


@contextmanager
def gpu(path: Path, capability: int, fake: FakeCuda | None = None) -> Iterator[tuple[Lookup, FakeCuda, list[str]]]:
    """A fake GPU whose kernels come from `path`; the lookup, the driver library, and what was said."""
    fake, said = fake or FakeCuda(), list[str]()
    linear = millstream_kernels.linear
    modules = (millstream_kernels.attention.prefill, linear.nf4, linear.w4a16, linear.w8a8, linear.w8a16, linear.w16a16)
    tables = [kernel.device_caches for kernel in KERNELS.values()]
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            assert module.capability_of is capability_of
            patch.setattr(module, "capability_of", lambda _: capability)
        patch.setattr(triton.runtime.driver, "_active", None)
        patch.setattr(triton.compiler, "compile", triton.compiler.compile)
        triton.compiler.compiler.max_shared_mem.cache_clear()
        for table in tables:
            table.clear()
        try:
            lookup = install(path, said.append, library=CudaLibrary(fake), device=fake_device(capability))
            yield lookup, fake, said
        finally:
            triton.compiler.compiler.max_shared_mem.cache_clear()
            for table in tables:
                table.clear()


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize(("capability", "code"), [(80, 80), (90, 90)])
def test_every_variant_is_what_its_own_function_starts_and_nothing_is_compiled(
    folder: Path, capability: int, code: int
) -> None:
    with gpu(folder, capability) as (lookup, fake, said):
        wrong = []
        for variant in VARIANTS:
            if code in variant.capabilities:
                try:
                    start(variant, capability)
                except (PrebuiltError, LookupError) as error:
                    wrong.append(f"{variant.kernel_name} {variant.name}: {error}")
        assert not wrong, "\n".join(wrong)
        found = {entry.key for entry in lookup.found}
        unused = [str(one) for one in lookup.folder.entries.values() if one.capability == code and one.key not in found]
        assert not unused, "no call starts these variants:\n" + "\n".join(unused)
        assert lookup.counts == {Result.FOUND: len(found)}
        assert (lookup.compiled, said) == ([], [])
        assert {launch.kernel for launch in fake.launches} == {*KERNELS}
        for launch in fake.launches:
            count = sum(not parameter.is_constexpr for parameter in KERNELS[launch.kernel].params)
            assert len(launch.arguments) == count + 2
            assert launch.stream == FAKE_STREAM


@pytest.mark.usefixtures("no_compiler")
def test_a_launch_arrives_with_its_grid_arguments_and_shared_memory(folder: Path) -> None:
    x, output = torch.empty(3, 2 * 1536, dtype=torch.bfloat16), torch.empty(3, 1536, dtype=torch.bfloat16)
    with gpu(folder, 90) as (_, fake, _):
        gated_activation(x, Activation.SILU, output=output)
        (launch,) = fake.launches
    assert (launch.grid, launch.block, launch.shared_bytes) == ((3, 2, 1), (128, 1, 1), 0)
    scratch = (bytes(8), bytes(8))
    sizes = (struct.pack("i", 3072 // 8), struct.pack("i", 1536 // 8))
    assert launch.arguments == (struct.pack("Q", x.data_ptr()), struct.pack("Q", output.data_ptr()), *sizes, *scratch)


@pytest.mark.usefixtures("no_compiler")
def test_more_shared_memory_than_a_block_has_at_first_is_asked_for(folder: Path) -> None:
    variant = next(one for one in VARIANTS if one.kernel is paged_decode and one.name == "bf16-head256")
    with gpu(folder, 90) as (_, fake, _):
        start(variant, 90)
        launch = next(one for one in fake.launches if one.kernel == "paged_decode")
    assert launch.shared_bytes > 48 << 10
    assert "cuFuncSetAttribute" in fake.calls
    with gpu(folder, 90, FakeCuda(shared_bytes=48 << 10)), pytest.raises(triton.runtime.errors.OutOfResources):
        start(variant, 90)


@pytest.mark.usefixtures("no_compiler")
def test_a_launch_that_nothing_was_compiled_for_is_refused_by_name(folder: Path) -> None:
    with gpu(folder, 90) as (lookup, _, _):
        with pytest.raises(MissingKernelError) as refused:
            gated_tile[(1, 1)](torch.empty(8), torch.empty(8), 1, 1, UNIT=8, BLOCK=1024, GELU=False, num_warps=4)
        assert lookup.counts == {Result.MISSING: 1}
    message = str(refused.value)
    assert message.startswith("gated_tile for sm_90: no variant was compiled ahead; bf16-silu differs in ")
    assert "x (*fp32, not *bf16)" in message


@pytest.mark.usefixtures("no_compiler")
def test_a_tensor_that_begins_elsewhere_than_the_table_says_is_named(folder: Path) -> None:
    with gpu(folder, 90):
        flat = torch.empty(3 * 16 + 8, dtype=torch.bfloat16)
        with pytest.raises(MissingKernelError, match=r"bf16-silu differs in x \(no multiple of 16\)$"):
            gated_tile[(1, 1)](flat[4:], flat, 1, 1, UNIT=8, BLOCK=1024, GELU=False, num_warps=4)


def start_small() -> None:
    gated_activation(torch.empty(3, 32, dtype=torch.bfloat16), Activation.SILU)


def damage(folder: Path, tmp_path: Path, suffix: str) -> Path:
    """A copy of the folder in which no file of `suffix` is what the index says."""
    copy = tmp_path / "damaged"
    shutil.copytree(folder, copy)
    for path in copy.glob(f"*.{suffix}"):
        path.write_bytes(path.read_bytes()[:-1])
    return copy


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("suffix", ["cubin", "json"])
def test_a_damaged_entry_is_an_error_where_it_cannot_be_compiled_anew(
    folder: Path, tmp_path: Path, suffix: str
) -> None:
    copy = damage(folder, tmp_path, suffix)
    if suffix == "json":
        (copy / INDEX).write_bytes((folder / INDEX).read_bytes())
    with gpu(copy, 90) as (lookup, fake, _):
        with pytest.raises(PrebuiltError, match=r"gated_tile bf16-silu for sm_90: .*is damaged.*there is no ptxas"):
            start_small()
        assert lookup.counts == {Result.DAMAGED: 1}
        assert fake.launches == []


def test_a_damaged_entry_is_compiled_anew_where_ptxas_is(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    with gpu(damage(folder, tmp_path, "cubin"), 90) as (lookup, fake, said):
        start_small()
        assert (lookup.counts, lookup.compiled) == ({Result.DAMAGED: 1}, ["gated_tile"])
        assert [launch.kernel for launch in fake.launches] == ["gated_tile"]
        (sentence,) = said
        assert sentence.endswith("; it is compiled now")


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"format": 2}, "has format 2; this runtime reads 1"),
        ({"triton": "3.5.0"}, f"was compiled by Triton 3.5.0, and {triton.__version__} is installed"),
        ({"entries": [{"key": "a"}]}, "is damaged: "),
    ],
)
def test_a_foreign_folder_is_refused(folder: Path, tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    index = json.loads((folder / INDEX).read_bytes()) | change
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(PrebuiltError, match=problem), gpu(tmp_path, 90):
        pass
    for text in ("[", "[" * 100_000):
        (tmp_path / INDEX).write_text(text)
        with pytest.raises(PrebuiltError, match="is damaged"):
            PrebuiltFolder.open(tmp_path)
    with pytest.raises(PrebuiltError, match="No such file"):
        PrebuiltFolder.open(tmp_path / "none")


@pytest.mark.usefixtures("no_compiler")
def test_a_thread_without_a_context_gets_the_devices_and_any_other_failure_is_named(folder: Path) -> None:
    fake = FakeCuda()
    with gpu(folder, 90, fake), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        fake.fails["cuLaunchKernel"] = [201]
        start_small()
        assert len(fake.launches) == 1
        fake.fails["cuLaunchKernel"] = [719]
        with pytest.raises(CudaError, match=r"cuLaunchKernel failed: CUDA_ERROR_FAKE \(719\)"):
            start_small()


@pytest.mark.quick
def test_code_for_sm_80_serves_8_x_and_that_for_sm_90_its_own_gpu_alone() -> None:
    assert {one: compiled_for(one) for one in (75, 80, 86, 89, 90, 100, 120)} == {
        75: None, 80: 80, 86: 80, 89: 80, 90: 90, 100: None, 120: None
    }  # fmt: skip


@pytest.mark.usefixtures("no_compiler")
def test_a_gpu_of_8_9_starts_the_code_for_sm_80_within_its_shared_memory(folder: Path) -> None:
    with gpu(folder, 89, FakeCuda(shared_bytes=99 << 10)) as (lookup, fake, _):
        for kernel in ("paged_decode", "rope_kv_write_heads", "w8a8_product"):
            start(next(one for one in VARIANTS if one.kernel_name == kernel and 80 in one.capabilities), 89)
        assert {entry.capability for entry in lookup.found} == {80}
    assert fake.launches
    sizes = [one.stat().st_size for one in folder.glob("*.cubin")]
    assert sum(sizes) < 32 << 20, "what every node pulls"


def test_what_did_not_change_is_not_compiled_again(folder: Path, tmp_path: Path) -> None:
    assert prebuild(tmp_path / "again") == 0
    assert (tmp_path / "again" / INDEX).read_bytes() == (folder / INDEX).read_bytes()


@pytest.mark.quick
def test_a_damaged_file_of_the_store_is_compiled_again(tmp_path: Path) -> None:
    (variant,) = [one for one in VARIANTS if one.kernel is gated_tile and one.name == "bf16-silu"]
    wanted = [(variant, 90)]
    (before,), fresh = compile_all(wanted, tmp_path)
    assert fresh == 1
    before.cubin.write_bytes(b"x")
    (after,), fresh = compile_all(wanted, tmp_path)
    assert (after, fresh) == (before, 1)
    assert compile_all(wanted, tmp_path) == ([after], 0)
