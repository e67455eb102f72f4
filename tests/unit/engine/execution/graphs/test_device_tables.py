"""Block tables on the device are those of the requests, and a step sends what has changed and no more."""

from __future__ import annotations

import random

import pytest
import torch

from millstream_runtime.engine.execution.execution_mode import Execution
from millstream_runtime.engine.execution.graphs import device_tables
from millstream_runtime.engine.execution.graphs.device_tables import DeviceTables
from millstream_runtime.engine.execution.step_input import ChunkInput
from tests.support.engines import MakeEngine, WriteModel, generate, greedy, requests_for
from tests.support.tape_recorder import TapeRecorder

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS, WIDTH, ZERO = 4, 12, 99


def chunk(table: list[int], owner: tuple[int, int] | None) -> ChunkInput:
    return ChunkInput(1, len(table), 0, table[0], len(table), table, owner=owner)


def row_of(tables: DeviceTables, row: int) -> list[int]:
    numbers: list[int] = tables.view(WIDTH)[row].tolist()
    return numbers


@pytest.fixture
def tables() -> DeviceTables:
    return DeviceTables(ROWS, WIDTH, ZERO, torch.device("cpu"))


def test_a_row_sends_the_blocks_that_it_gets(tables: DeviceTables) -> None:
    owner, memory = (0, 0), tables.view(WIDTH).data_ptr()
    assert tables.update([2], [chunk([7, 3], owner)], [range(2)]) == 2
    assert tables.update([2], [chunk([7, 3], owner)], [range(2)]) == 0
    assert tables.update([2], [chunk([7, 3, 9], owner)], [range(3)]) == 1
    assert tables.update([2], [chunk([7, 3, 9, 4], owner)], [range(2, 4)]) == 3, "a window has passed two"
    assert row_of(tables, 2) == [ZERO, ZERO, 9, 4, *[ZERO] * 8]
    assert tables.update([2], [chunk([5], (1, 0))], [range(1)]) == 3, "another request's"
    assert row_of(tables, 2) == [5, *[ZERO] * 11]
    assert row_of(tables, tables.padding_row) == [ZERO] * WIDTH
    assert tables.view(3).data_ptr() == memory, "a graph finds it where it was"


def test_a_table_without_an_owner_is_written_anew(tables: DeviceTables) -> None:
    assert tables.update([0], [chunk([7, 3], None)], [range(2)]) == 2
    assert tables.update([0], [chunk([1, 2], None)], [range(2)]) == 2
    assert row_of(tables, 0)[:3] == [1, 2, ZERO]


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_those_of_whoever_has_them(seed: int, tables: DeviceTables) -> None:
    """Requests come, grow, leave, lose their blocks and get others; steps leave some rows out; windows pass."""
    choose = random.Random(seed)
    held: dict[int, tuple[tuple[int, int], list[int], int]] = {}  # by row: owner, blocks, first column seen
    sent = 0
    for number in range(60):
        for row in range(ROWS):
            if row not in held or choose.random() < 0.1:
                held[row] = ((number, choose.randrange(2)), [choose.randrange(90)], 0)
            owner, table, first = held[row]
            table = [*table, *(choose.randrange(90) for _ in range(choose.choice((0, 0, 1, 4))))][:WIDTH]
            held[row] = (owner, table, min(len(table) - 1, first + choose.choice((0, 0, 0, 1))))
        rows = [row for row in range(ROWS) if choose.random() < 0.7]
        chunks = [chunk(held[row][1], held[row][0]) for row in rows]
        sent += tables.update(rows, chunks, [range(held[row][2], len(held[row][1])) for row in rows])
        for row in rows:
            _, table, first = held[row]
            assert row_of(tables, row) == [ZERO] * first + table[first:] + [ZERO] * (WIDTH - len(table))
        assert row_of(tables, tables.padding_row) == [ZERO] * WIDTH
    assert 0 < sent < 60 * ROWS * WIDTH // 4


def test_a_copy_that_fails_is_made_again(tables: DeviceTables, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is computed again: what never reached the device must not count as sent."""

    def fails(*numbers: object) -> torch.Tensor:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(device_tables, "on_device", fails)
        with pytest.raises(torch.OutOfMemoryError):
            tables.update([1], [chunk([7], (0, 0))], [range(1)])
    assert tables.update([1], [chunk([7], (0, 0))], [range(1)]) == 1
    assert row_of(tables, 1)[0] == 7


def test_replayed_steps_send_a_block_once(
    write_model: WriteModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    update = DeviceTables.update

    def counted(self: DeviceTables, *step: object) -> int:
        sent.append(update(self, *step))  # type: ignore[arg-type]
        return sent[-1]

    monkeypatch.setattr(DeviceTables, "update", counted)
    engine = make_engine(write_model(), execution=Execution(TapeRecorder(), overlapped=True))
    recorded = len(sent)
    generate(engine, requests_for([list(range(2, 22)), [5, 6, 7]], greedy(40)))
    by_step = sent[recorded:]
    assert len(by_step) >= 35
    assert sum(by_step) == -(-59 // 16) + -(-42 // 16), "the blocks of both; the last tokens are not computed"
    assert sum(one > 0 for one in by_step) <= 6
