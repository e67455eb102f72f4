"""What a GPU reads in place: the plan of an eager step, the buffers of a graph, and the same tokens by both.

Reference mathematics stand in for the kernel; `tests/gpu` compares the kernel itself.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from millstream_runtime.engine.attention.paged_attention import TorchAttention
from millstream_runtime.engine.attention.varlen_attention import VarlenCall
from millstream_runtime.engine.execution.execution_mode import Execution
from millstream_runtime.engine.execution.graphs.buckets import FULL_WIDTH_ROWS, Bucket, Buckets
from millstream_runtime.engine.execution.graphs.static_decode import StaticDecode
from millstream_runtime.engine.execution.step_input import StepInput
from millstream_runtime.models.layers.attention import AttentionSpec
from tests.support.engines import MakeEngine, WriteModel, generate, greedy, requests_for
from tests.support.tape_recorder import TapeRecorder
from tests.support.varlen_reference import use_reference
from tests.unit.engine.execution.graphs.test_static_decode import Tables, chunk_input, padded
from tests.unit.engine.test_parity import prompts_of

from .test_paged_attention import BLOCK, CASES, SPECS, cache_of, chunk

pytestmark = pytest.mark.deep

PROMPTS = prompts_of(199, [1, 15, 16, 40, 70])


@pytest.fixture(autouse=True)
def _reference(monkeypatch: pytest.MonkeyPatch) -> None:
    use_reference(monkeypatch)


@pytest.mark.parametrize("spec_name", SPECS)
@pytest.mark.parametrize("name", CASES)
def test_a_step_computes_the_same_with_and_without(name: str, spec_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks, spec = CASES[name], SPECS[spec_name]
    num_tokens = sum(one.num_tokens for one in chunks)
    slots = torch.cat(
        [
            torch.tensor(one.block_table).repeat_interleave(BLOCK)[: one.context_len][-one.num_tokens :] * BLOCK
            + torch.arange(one.context_len - one.num_tokens, one.context_len) % BLOCK
            for one in chunks
        ]
    )
    generator = torch.Generator().manual_seed(3)
    query, key_value = (torch.randn(num_tokens, heads, 16, generator=generator) for heads in (6, 6))
    with_varlen = TorchAttention(cache_of(3, 16), slots, chunks)(0, query, key_value, spec)
    monkeypatch.undo()
    without = TorchAttention(cache_of(3, 16), slots, chunks)(0, query, key_value, spec)
    torch.testing.assert_close(with_varlen, without, rtol=1e-5, atol=1e-5)


def test_one_call_for_decodes_and_one_for_prompts_and_none_for_what_the_kernel_cannot() -> None:
    decodes = [chunk(1, n, list(range(8 * i, 8 * i + 4))) for i, n in enumerate([33, 50, 64])]
    scattered = [chunk(1, 40, [60, 41, 43])]
    prompts = [chunk(20, 20, [30, 31]), chunk(2, 33, [34, 35, 36])]
    attention = TorchAttention(cache_of(3, 16), torch.arange(26), [*decodes, *scattered, *prompts])
    plain = AttentionSpec(1.0)
    kinds = [type(call) is VarlenCall for call in attention._calls(plain)]
    assert kinds == [True, False, True]
    assert [call.rows for call in attention._calls(plain)] == [slice(0, 3), slice(3, 4), slice(4, 26)]
    for spec in (replace(plain, window=63), replace(plain, softcap=50.0), replace(plain, latent_dim=8)):
        assert not any(type(call) is VarlenCall for call in attention._calls(spec))
    assert any(type(call) is VarlenCall for call in attention._calls(replace(plain, window=64)))


def test_rows_that_read_in_place_need_no_tables_and_padding_reads_the_zero_block() -> None:
    cache = padded(cache_of(num_kv_heads=1, head_dim=8))
    bucket = Bucket(4, 9, in_place=True)
    static = StaticDecode(Tables(), cache, [bucket])  # type: ignore[arg-type]
    step = StepInput([7, 9], [chunk_input(33, [4, 5, 6]), chunk_input(1, [20])], [])
    buffers = static.fill(bucket, step)
    assert buffers.tables.shape == (4, 0)
    zero, sink = cache.zero_block * BLOCK, cache.sink_block * BLOCK
    assert buffers.first_slots.tolist() == [4 * BLOCK, 20 * BLOCK, zero, zero]
    assert buffers.slots.tolist() == [4 * BLOCK + 32, 20 * BLOCK, sink, sink]
    assert buffers.lengths.tolist() == [33, 1, 1, 1]


def test_buckets_that_read_in_place_have_no_bound_and_one_width_for_many_rows() -> None:
    buckets = Buckets(256, 128, most_cells=512, in_place=True)
    assert buckets.holding(3, 9, contiguous=True) == Bucket(3, 16, in_place=True)
    assert buckets.holding(256, 9, contiguous=True) == Bucket(256, 128, in_place=True)
    assert buckets.holding(FULL_WIDTH_ROWS, 1, contiguous=True) == Bucket(FULL_WIDTH_ROWS, 128, in_place=True)
    assert buckets.holding(3, 9) == Bucket(3, 16)
    assert buckets.holding(256, 9) is None
    assert buckets.largest is not None
    first, *others = buckets.to_record()
    assert first == buckets.largest
    assert others[:6] == [Bucket(1, width, in_place=True) for width in (128, 64, 32, 16, 8, 4)]


@pytest.mark.parametrize("overlapped", [False, True])
def test_graphs_that_read_in_place_give_the_same_tokens(
    overlapped: bool, write_model: WriteModel, make_engine: MakeEngine
) -> None:
    expected = generate(make_engine(write_model()), requests_for(PROMPTS, greedy(30)))
    engine = make_engine(write_model(), execution=Execution(TapeRecorder(), overlapped=overlapped))
    for _ in range(2):  # the second time prompts meet the blocks of the first
        assert generate(engine, requests_for(PROMPTS, greedy(30))) == expected
    assert engine.graphs is not None
    assert engine.graphs.replayed_steps > 0
