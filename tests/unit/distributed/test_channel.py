"""Messages between ranks arrive as they were sent, and nothing else is taken for one."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from millstream_runtime.config import Device, RuntimeConfig
from millstream_runtime.distributed.channel import MAX_MESSAGE_BYTES, Channel
from millstream_runtime.distributed.messages import Command, Leave, LoadShard, Measured, RankFailed, Reply
from millstream_runtime.engine.execution.step_input import ChunkInput, StepInput, ZeroBlocks
from millstream_runtime.errors import FailureReason

Leading = Channel[Command, Reply]
Following = Channel[Reply, Command]


@pytest.fixture
def ends() -> Iterator[tuple[Leading, Following, socket.socket]]:
    """Both ends, and the raw socket below the first."""
    mine, theirs = socket.socketpair()
    leading, following = Leading(mine, Reply), Following(theirs, Command)
    yield leading, following, mine
    leading.close()
    following.close()


def test_what_is_sent_arrives(ends: tuple[Leading, Following, socket.socket]) -> None:
    leading, following, _ = ends
    config = RuntimeConfig(model="/models/x", served_model_name="x", device=Device.CPU, tensor_parallel_size=2)
    chunks = [ChunkInput(1, 17, 0, 4, 2), ChunkInput(3, 35, 64, 9, 3, [9, 2, 5])]
    commands: list[Command] = [
        LoadShard(config),
        StepInput([7, 1, 2, 3], chunks, [[0, 3]]),
        StepInput([-1, 1, 2, 3], chunks, [[0, 3]], unread_places=[0], unread_rows=[5], kept_rows=[5, 2]),
        ZeroBlocks([4, 5]),
        Leave(),
    ]
    for command in commands:
        leading.send(command)
    assert [following.receive() for _ in commands] == commands
    replies: list[Reply] = [Measured(1 << 40), RankFailed(FailureReason.OUT_OF_MEMORY, "Rank 1 ran out of memory.")]
    for reply in replies:
        following.send(reply)
    assert [leading.receive() for _ in replies] == replies


def test_a_block_table_is_sent_only_where_it_is_scattered() -> None:
    assert list(ChunkInput(1, 17, 0, 4, 2).block_table) == [4, 5]
    assert list(ChunkInput(1, 17, 0, 9, 2, [9, 2]).block_table) == [9, 2]


def test_the_end_of_the_stream_is_no_message(ends: tuple[Leading, Following, socket.socket]) -> None:
    _, following, mine = ends
    mine.sendall((100).to_bytes(4, "big") + b"only half of")
    mine.shutdown(socket.SHUT_WR)
    assert following.receive() is None


@pytest.mark.parametrize(
    "sent",
    [
        (MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"),
        (2).to_bytes(4, "big") + b"\x91\xc0",  # [nil]: of no known type
        (1).to_bytes(4, "big") + b"\xc1",  # no msgpack at all
    ],
)
def test_what_is_no_command_is_refused(sent: bytes, ends: tuple[Leading, Following, socket.socket]) -> None:
    _, following, mine = ends
    mine.sendall(sent)
    with pytest.raises(ValueError, match=r"."):
        following.receive()
