"""Container limits from cgroup files of both versions, and the KV pool's size from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream_runtime.engine.host_limits import claimed_bytes, container_limit_bytes, memory_limit_bytes, usable_cpus
from millstream_runtime.engine.kv import pool_size
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.kv_layout import MOST_BLOCKS

GIB = 1 << 30


def test_memory_limit_of_cgroup_v2_v1_and_none(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:        8388608 kB\nMemFree: 1 kB\n")
    assert memory_limit_bytes(tmp_path, meminfo) == 8 * GIB
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")  # v1's "no limit"
    assert memory_limit_bytes(tmp_path, meminfo) == 8 * GIB
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(f"{3 * GIB}\n")
    assert memory_limit_bytes(tmp_path, meminfo) == 3 * GIB
    (tmp_path / "memory.max").write_text(f"{2 * GIB}\n")
    assert memory_limit_bytes(tmp_path, meminfo) == 2 * GIB
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_limit_bytes(tmp_path, meminfo) == 3 * GIB


def test_cpu_quota_rounds_up_and_never_below_one(tmp_path: Path) -> None:
    everything = usable_cpus(tmp_path)
    assert everything >= 1
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert usable_cpus(tmp_path) == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_cpus(tmp_path) == everything


def size(available_bytes: int, **overrides: object) -> pool_size.PoolSize:
    budget = pool_size.MemoryBudget(limit_bytes=GIB, used_bytes=0, reserve_bytes=0, available_bytes=available_bytes)
    return size_with(budget, **overrides)


def size_with(budget: pool_size.MemoryBudget, **overrides: object) -> pool_size.PoolSize:
    arguments = {
        "asked_bytes": None,
        "block_bytes": 1 << 10,
        "block_size_tokens": 16,
        "max_model_len": 1000,
        "max_model_len_is_explicit": True,
        "max_num_seqs": 2,
    } | overrides
    return pool_size.size_pool(budget, **arguments)  # type: ignore[arg-type]


def test_mapped_files_beyond_the_code_that_runs_are_not_claimed(tmp_path: Path) -> None:
    """As the kernel says it: of a process with torch some 280 MiB are mapped libraries, which it can drop."""
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nRssAnon:\t  300000 kB\nRssFile:\t  280000 kB\nRssShmem:\t  1000 kB\n")
    assert claimed_bytes(status) == (301_000 << 10) + (80 << 20)
    status.write_text("RssAnon:\t  300000 kB\nRssFile:\t  8 kB\nRssShmem:\t  0 kB\n")
    assert claimed_bytes(status) == 300_008 << 10


def test_less_room_than_planned_ends_the_boot_with_both_lengths() -> None:
    planned = {"max_model_len_is_explicit": False, "planned_model_len": 160}
    assert size(10 << 10, **planned) == pool_size.PoolSize(10, 160)
    with pytest.raises(RuntimeFailure, match="holds a request of 144 tokens, but 160 were planned") as caught:
        size(9 << 10, **planned)
    assert caught.value.reason is FailureReason.OUT_OF_MEMORY
    assert "limits.memory" in caught.value.message
    assert "spec.engine.maxModelLen" in caught.value.message
    whole = size(100 << 10, **(planned | {"planned_model_len": 2000}))
    assert whole == pool_size.PoolSize(100, 1000), "no more than the model allows"


def test_a_limit_below_the_process_ends_the_boot_with_what_was_planned_and_offers_no_shorter_request() -> None:
    budget = pool_size.cpu_budget(GIB // 4, GIB // 2, is_container=True)
    for planned, words in ((160, " of the 160 tokens that were planned;"), (None, "room for a KV cache;")):
        with pytest.raises(RuntimeFailure, match=r"take 0\.50 GiB, and only 0\.25 GiB are usable") as caught:
            size_with(budget, max_model_len_is_explicit=False, planned_model_len=planned)
        assert caught.value.reason is FailureReason.OUT_OF_MEMORY
        assert words in caught.value.message
        assert "limits.memory" in caught.value.message
        assert "max-model-len" not in caught.value.message


def test_a_node_that_lost_half_its_memory_is_counted_as_it_is_now(tmp_path: Path) -> None:
    """A container of 2 GiB whose process holds 1 GiB, planned for requests of 8,192 tokens, 16 per MiB.

    4 GiB of node: 2048 - 1024 - 256 - 102.4 MiB are 665 blocks. 1.5 GiB, less than the container's limit and shared
    with other processes: 1536 - 1024 - 256 MiB are 256 blocks, for 4,096 tokens.
    """
    meminfo = tmp_path / "meminfo"
    (tmp_path / "memory.max").write_text(f"{2 * GIB}\n")
    planned = {"block_bytes": 1 << 20, "max_model_len": 8192, "max_model_len_is_explicit": False}

    def booted(node_kibibytes: int) -> pool_size.PoolSize:
        meminfo.write_text(f"MemTotal: {node_kibibytes} kB\n")
        is_container = container_limit_bytes(tmp_path, meminfo) is not None
        budget = pool_size.cpu_budget(memory_limit_bytes(tmp_path, meminfo), GIB, is_container=is_container)
        return size(budget.available_bytes, **planned, planned_model_len=8192)

    assert booted(4 << 20) == pool_size.PoolSize(665, 8192)
    with pytest.raises(RuntimeFailure, match="holds a request of 4096 tokens, but 8192 were planned"):
        booted(3 << 19)


def test_the_pool_takes_what_it_may() -> None:
    assert size(1 << 20) == pool_size.PoolSize(1024, 1000)  # 63 blocks a request, two requests: the rest is cache
    assert size(100 << 10) == pool_size.PoolSize(100, 1000)
    assert size(0, asked_bytes=70 << 10) == pool_size.PoolSize(70, 1000)
    assert size(10 << 10, max_model_len_is_explicit=False) == pool_size.PoolSize(10, 160)


def test_the_pool_has_no_more_blocks_than_can_be_counted_quickly() -> None:
    assert size(1 << 40).num_blocks == MOST_BLOCKS
    assert size(1 << 40, max_num_seqs=8000).num_blocks == 63 * 8000, "but as many as running requests need"


def test_refusals_show_the_budget() -> None:
    with pytest.raises(RuntimeFailure, match=r"1000 tokens needs .* usable - .* leaves .* holds 160 tokens"):
        size(10 << 10)
    with pytest.raises(RuntimeFailure, match="holds 0 tokens"):
        size(0, max_model_len_is_explicit=False)


def test_the_cpu_share_leaves_room_for_the_process() -> None:
    roomy = pool_size.cpu_budget(10 * GIB, used_bytes=GIB)
    assert roomy.available_bytes == 3 * GIB
    tight = pool_size.cpu_budget(GIB, used_bytes=GIB - (300 << 20))
    assert tight.available_bytes == 44 << 20
    assert pool_size.cpu_budget(GIB, used_bytes=2 * GIB).available_bytes == 0


def test_in_a_container_the_pool_takes_what_the_largest_step_and_a_margin_leave() -> None:
    step_bytes = GIB // 2
    budget = pool_size.cpu_budget(10 * GIB, GIB, step_bytes, is_container=True)
    assert budget.available_bytes == 10 * GIB - GIB - step_bytes - GIB // 2 - (256 << 20)
    assert budget.limit_bytes == budget.used_bytes + budget.reserve_bytes + budget.available_bytes
    assert budget.activations_bytes == step_bytes


@pytest.mark.parametrize("used_bytes", [GIB // 2, GIB, 3 * GIB])
@pytest.mark.parametrize("limit_bytes", [GIB, 2 * GIB, 4 * GIB, 64 * GIB])
@pytest.mark.parametrize("step_bytes", [0, GIB // 4, 2 * GIB])
def test_the_pool_never_gets_less_than_the_planner_promises(used_bytes: int, limit_bytes: int, step_bytes: int) -> None:
    left = limit_bytes - used_bytes - (256 << 20) - step_bytes - limit_bytes * 5 // 100
    promised = max(0, min(left, limit_bytes * 30 // 100))
    budget = pool_size.cpu_budget(limit_bytes, used_bytes, step_bytes, is_container=True)
    assert budget.available_bytes >= promised


@pytest.mark.parametrize("used_bytes", [GIB // 2, GIB, 3 * GIB])
@pytest.mark.parametrize("limit_bytes", [GIB, 2 * GIB, 4 * GIB, 64 * GIB])
@pytest.mark.parametrize("step_bytes", [0, GIB // 4, 2 * GIB])
def test_the_pool_and_the_largest_step_fit_into_a_container_together(
    used_bytes: int, limit_bytes: int, step_bytes: int
) -> None:
    """The kernel kills the process that takes more than the limit, in the middle of answers."""
    budget = pool_size.cpu_budget(limit_bytes, used_bytes, step_bytes, is_container=True)
    assert budget.available_bytes == 0 or used_bytes + step_bytes + budget.available_bytes < limit_bytes


TIGHT = pool_size.cpu_budget(4 * GIB, 2 * GIB, 2 * GIB, is_container=True)  # the step leaves nothing


def size_tight(block_bytes: int, **overrides: object) -> pool_size.PoolSize:
    arguments = {
        "asked_bytes": None,
        "block_bytes": block_bytes,
        "block_size_tokens": 16,
        "max_model_len": 1000,
        "max_model_len_is_explicit": True,
        "max_num_seqs": 2,
    } | overrides
    return pool_size.size_pool(TIGHT, **arguments)  # type: ignore[arg-type]


def test_one_request_that_was_planned_without_the_step_still_fits() -> None:
    """Plans of earlier releases counted 256 MiB for the step: their pods must start."""
    assert TIGHT.available_bytes == 0
    assert size_tight(1 << 20) == pool_size.PoolSize(63, 1000), "63 blocks of 16 tokens, and nothing for a second one"
    assert size_tight(1 << 20, max_model_len_is_explicit=False) == pool_size.PoolSize(8, 128)
    assert size_tight(1 << 20, asked_bytes=70 << 20) == pool_size.PoolSize(70, 1000)


def test_one_request_for_which_no_plan_had_memory_is_refused_with_the_budget() -> None:
    with pytest.raises(
        RuntimeFailure, match=r"1000 tokens needs 3\.94 GiB, but 4\.00 GiB usable .* leaves 0\.0 MiB: .* 0 tok"
    ):
        size_tight(64 << 20)


@pytest.mark.parametrize("weight_bytes", [0, GIB // 2, GIB, 2 * GIB, 3 * GIB])
@pytest.mark.parametrize("limit_bytes", [GIB, 3 * GIB, 4 * GIB])
def test_second_copies_of_weights_leave_the_pool_what_it_would_get_without_them(
    limit_bytes: int, weight_bytes: int
) -> None:
    process_bytes = 350 << 20
    copies_bytes = pool_size.copy_budget_bytes(limit_bytes, process_bytes, weight_bytes)
    without = pool_size.cpu_budget(limit_bytes, process_bytes + weight_bytes)
    with_copies = pool_size.cpu_budget(limit_bytes, process_bytes + weight_bytes + copies_bytes)
    assert with_copies.available_bytes == without.available_bytes


@pytest.mark.parametrize("step_bytes", [0, GIB // 4, GIB])
@pytest.mark.parametrize("weight_bytes", [0, GIB // 2, GIB, 2 * GIB, 3 * GIB])
@pytest.mark.parametrize("limit_bytes", [GIB, 3 * GIB, 4 * GIB])
def test_in_a_container_second_copies_leave_the_pool_what_was_planned(
    limit_bytes: int, weight_bytes: int, step_bytes: int
) -> None:
    process_bytes = 350 << 20
    reserved_bytes = pool_size.step_reserve_bytes(limit_bytes, step_bytes)
    copies_bytes = pool_size.copy_budget_bytes(limit_bytes, process_bytes, weight_bytes, reserved_bytes)
    without, with_copies = (
        pool_size.cpu_budget(limit_bytes, process_bytes + used_bytes, step_bytes, is_container=True).available_bytes
        for used_bytes in (weight_bytes, weight_bytes + copies_bytes)
    )
    assert with_copies >= min(without, limit_bytes * 30 // 100)


def test_a_small_model_is_copied_and_one_that_fills_its_memory_is_not() -> None:
    assert pool_size.copy_budget_bytes(4 * GIB, GIB // 4, weight_bytes=GIB // 2) > GIB // 2
    assert pool_size.copy_budget_bytes(4 * GIB, GIB // 4, weight_bytes=3 * GIB) == 0
