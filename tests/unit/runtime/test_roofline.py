"""The roofline counts what kernels move and compute, and docs/kernels.md says what it counts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from millstream_runtime.roofline import ModelSizes, Rates, Work, step_work, weight_bytes_read
from tests.support import kernel_work

H200 = Rates(bytes_per_second=4.3e12, flops_per_second=790e12)  # a copy, and a large product in bfloat16
KERNELS_PAGE = Path(__file__).resolve().parents[3] / "docs" / "kernels.md"
SIZES = ModelSizes(
    active_parameters=1000, num_layers=2, num_heads=4, head_dim=8, read_bytes=2000, kv_bytes_per_token=16, ranks=2
)
EXPERTS = ModelSizes(
    active_parameters=1000,
    num_layers=2,
    num_heads=4,
    head_dim=8,
    read_bytes=2000,
    experts_bytes=800,
    num_experts=8,
    num_experts_per_token=2,
)


def test_a_step_reads_its_weights_once_and_the_cache_of_what_is_seen() -> None:
    assert step_work(SIZES, 3, 10) == Work(2000 + 10 * 16, (2 * 1000 * 3 + 4 * 2 * 4 * 8 * 10) / 2)


def test_experts_that_no_token_is_routed_to_are_not_read() -> None:
    assert weight_bytes_read(EXPERTS, 1) == 2000 - 800 * 0.75
    assert weight_bytes_read(EXPERTS, 2) == 2000 - 800 * 0.75**2
    assert weight_bytes_read(SIZES, 1) == 2000


def test_bytes_and_flops_overlap_and_launches_do_not() -> None:
    rates = Rates(bytes_per_second=10, flops_per_second=100, launch_seconds=0.5)
    assert rates.seconds(Work(num_bytes=20, flops=100, launches=2)) == 2.0 + 1.0
    assert rates.seconds(Work(num_bytes=5, flops=100)) == 1.0
    assert Work(1, 2, 3) + Work(10, 20, 30) == Work(11, 22, 33)


ROWS = (64 << 20) // 2 // 4096  # 64 MiB of rows of 4096 in 16 bits
FLOORS = {
    "32k tokens of 8 KV heads of 128": kernel_work.attention(
        1, 32768, 32768, num_heads=32, num_kv_heads=8, head_dim=128
    ),
    "32k tokens of 512 + 64": kernel_work.latent_attention(1, 32768, num_heads=16, latent_dim=512, rotary_dim=64),
    "64 MiB in bfloat16, with the residual": kernel_work.rms_norm(ROWS, 4096, residual=True),
    "64 MiB of outputs in bfloat16": kernel_work.gated_activation(ROWS, 4096),
    "35 MB of weights, up to 16 rows": kernel_work.linear(16, 16384, 4096, bits=4, group_size=128),
    "134 MB of weights, up to 64 rows": kernel_work.linear(64, 16384, 4096),
    "67 MB of weights, up to 64 rows": kernel_work.linear(64, 16384, 4096, bits=8),
    "67 MB of codes, up to 16 rows": kernel_work.linear(16, 16384, 4096, bits=8, quantizes_inputs=False),
    "38 MB of NF4, up to 16 rows": kernel_work.linear(16, 16384, 4096, bits=4, group_size=64),
    "8k tokens, 32 and 8 heads of 128": kernel_work.rope_kv_write(8192, 32, 8, 128),
    "64 rows of 128k in bfloat16": kernel_work.sample(64, 128_000),
}


@pytest.mark.parametrize("example", FLOORS)
def test_the_floors_of_the_docs_are_the_rooflines(example: str) -> None:
    (said,) = re.findall(re.escape(example) + r"[^|]*?: (\d+) µs", KERNELS_PAGE.read_text(encoding="utf-8"))
    assert H200.seconds(FLOORS[example]) * 1e6 == pytest.approx(int(said), rel=0.06)


@pytest.mark.parametrize(
    ("plain", "more", "num_bytes"),
    [
        (kernel_work.rms_norm(3, 64), kernel_work.rms_norm(3, 64, residual=True), 3 * 64 * 4),
        (kernel_work.rms_norm(3, 64, quantized=True), kernel_work.rms_norm(3, 64), 3 * (64 - 4)),
        (kernel_work.gated_activation(3, 64, quantized=True), kernel_work.gated_activation(3, 64), 3 * (64 - 4)),
        (kernel_work.linear(2, 8, 128, bits=4), kernel_work.linear(2, 8, 128, bits=4, group_size=32), 8 * 4 * 4),
        (kernel_work.linear(2, 8, 128, bits=8), kernel_work.linear(2, 8, 128), 8 * 128 + 2 * 128),
        (
            kernel_work.rope_kv_write(5, 4, 2, 16, kv_bytes=1),
            kernel_work.rope_kv_write(5, 4, 2, 16),
            5 * 2 * 2 * 16,
        ),
    ],
)
def test_what_an_option_adds(plain: Work, more: Work, num_bytes: int) -> None:
    assert more.num_bytes - plain.num_bytes == num_bytes
    assert more.flops == plain.flops
