"""Every production variant compiles for GPUs that are not here: no spill, the matrix instruction that was meant."""

from __future__ import annotations

from pathlib import Path

import pytest
import triton
import triton.language as tl

from hack.kernels import table
from hack.kernels.compile import CompiledVariant, compile_kernel, problems
from millstream_kernels.variant import TensorCores, Variant
from millstream_kernels.variants import VARIANTS

pytestmark = pytest.mark.deep


@pytest.fixture(autouse=True, scope="module")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield


@triton.jit
def product(left, right, target, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(left + m[:, None] * K + k[None, :])
    b = tl.load(right + k[:, None] * N + n[None, :])
    tl.store(target + m[:, None] * N + n[None, :], tl.dot(a, b))


def product_of(m: int, n: int, cores: TensorCores, unaligned: frozenset[str] = frozenset()) -> Variant:
    pointers = {"left": "*bf16", "right": "*bf16", "target": "*fp32"}
    return Variant("test", product, pointers, {"M": m, "N": n, "K": 64}, cores, unaligned=unaligned)


def compile_variant(variant: Variant, capability: int) -> CompiledVariant:
    return compile_kernel(variant, capability)[1]


def found(variant: Variant, capability: int) -> list[str]:
    return problems(variant, capability, compile_variant(variant, capability))


def test_tiles_of_64_rows_become_wgmma_on_sm_90_and_mma_on_sm_80() -> None:
    for capability in (80, 90):
        assert found(product_of(64, 64, TensorCores.WGMMA), capability) == []
        assert found(product_of(16, 64, TensorCores.MMA), capability) == []


@pytest.mark.quick
def test_a_variant_that_misses_its_matrix_instruction_is_found() -> None:
    (problem,) = found(product_of(16, 64, TensorCores.WGMMA), 90)
    assert "computes with mma.sync, was written for wgmma" in problem


def test_spills_are_found() -> None:
    problem = " ".join(found(product_of(256, 256, TensorCores.MMA), 80))
    assert "spills" in problem
    assert "bytes of stack" in problem


def test_loads_that_are_not_of_16_bytes_are_found() -> None:
    variant = product_of(64, 64, TensorCores.WGMMA, unaligned=frozenset({"left", "right"}))
    assert found(variant, 90) == ["product, test, sm_90: no load of 16 bytes"]


@pytest.mark.quick
def test_arguments_that_the_kernel_has_not_are_refused() -> None:
    variant = Variant("test", product, {"left": "*bf16", "wrong": "i32"}, {}, TensorCores.NONE)
    with pytest.raises(ValueError, match=r"'K', 'M', 'N', 'right', 'target', 'wrong'"):
        compile_variant(variant, 90)


KERNELS = sorted({variant.kernel_name for variant in VARIANTS})


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_production_variant_compiles_to_what_the_table_says(kernel: str) -> None:
    tables, wrong = table.compile_all(kernel)
    assert not wrong, "\n".join(wrong)
    changed = table.differences({kernel: table.read_all().get(kernel, {})}, tables)
    assert not changed, "run `python -m hack.kernels.table --write` and review the change:\n" + "\n".join(changed)


@pytest.mark.quick
def test_the_table_has_no_other_kernel() -> None:
    assert sorted(table.read_all()) == KERNELS


@pytest.mark.quick
def test_a_step_back_shows_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "FOLDER", tmp_path / "compiled")
    table.write_all({"one": {"a": {"sm_90": {"registers": 40}}}, "two": {}})
    before = table.read_all()
    assert table.differences(before, {"one": {"a": {"sm_90": {"registers": 40}}}, "two": {}}) == []
    (line,) = table.differences(before, {"one": {"a": {"sm_90": {"registers": 41}}}})
    assert line.startswith("one, a: ")
    table.write_all({"one": {}})
    assert table.read_all() == {"one": {}}
