"""Messages come out of a stream as they went in, however it was cut, and with the types they had."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream_runtime.boot import WeightsProgress
from millstream_runtime.config import Device, RuntimeConfig
from millstream_runtime.engine.kv.pool_size import MemoryUse
from millstream_runtime.engine.request import (
    EngineStats,
    FinishReason,
    Prefill,
    PromptPace,
    Request,
    SamplingParams,
    TokenLogprobs,
    TokenOutput,
)
from millstream_runtime.engine_process.framing import MAX_PAYLOAD_BYTES, FrameReader, FramingError, frame
from millstream_runtime.engine_process.messages import (
    Abort,
    Command,
    Event,
    Failed,
    Load,
    Loaded,
    ModelLimits,
    PhaseEntered,
    Ready,
    Refused,
    StepDone,
    Stop,
    Submit,
    WeightsRead,
    decode_command,
    decode_event,
    encode,
)
from millstream_runtime.errors import FailureReason

STATS = EngineStats(1, 2, 3, 4, 16, 5, 6, 7, 8, 9, 10)
PARAMS = SamplingParams(
    max_tokens=7,
    temperature=0.5,
    seed=2**63 + 126,  # the greatest that a request may have, and a candidate's number
    stop_token_ids=frozenset({3, 1}),
    logit_bias=((1, -100.0), (2, 0.5)),
    logprobs=0,
)
COMMANDS: list[Command] = [
    Load(RuntimeConfig(model="/m", served_model_name="m", device=Device.CPU, max_model_len=5)),
    Submit(Request("id", [1, 2, 3], PARAMS, priority=-3, cache_salt="Kö\0")),
    Abort("id"),
    Stop(),
]
LOGPROBS = TokenLogprobs(5, -0.25, 1, ((5, -0.25), (6, -1.5)))
EVENTS: list[Event] = [
    PhaseEntered("LoadingWeights", "Reading."),
    WeightsRead(WeightsProgress(5, 10, 0.25, 12.0)),
    Loaded(ModelLimits(2048, 272)),
    Loaded(
        ModelLimits(2048, 272),
        memory=MemoryUse(weights_bytes=1, activations_bytes=None, graphs_bytes=0, kv_cache_bytes=2, kv_cache_tokens=3),
    ),
    Ready(STATS, 12.5, 0.25),
    Ready(replace(STATS, prompt_pace=PromptPace(0.05, 0.25, 63, 0.08, 370.5)), 12.5, 0.25),
    StepDone((), STATS, 1.0),
    StepDone(
        (
            TokenOutput("a", 5, None, LOGPROBS, Prefill(1.5, 16, (None, LOGPROBS))),
            TokenOutput("b", None, FinishReason.ABORT),
        ),
        STATS,
        1.0,
        heartbeat_seconds=0.125,
    ),
    Refused("id", "why"),
    Failed(FailureReason.OUT_OF_MEMORY, "why"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda one: type(one).__name__)
def test_a_command_arrives_as_it_was_sent(command: Command) -> None:
    assert decode_command(encode(command)) == command


@pytest.mark.parametrize("event", EVENTS, ids=lambda one: type(one).__name__)
def test_an_event_arrives_as_it_was_sent(event: Event) -> None:
    assert decode_event(encode(event)) == event


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        encode(Stop()) + b"\x00",
        msgspec.msgpack.encode({"type": "Shout"}),
        msgspec.msgpack.encode({"type": "Abort", "request_id": 7}),
        msgspec.msgpack.encode({"type": "Abort"}),
        encode(EVENTS[0]),
    ],
)
def test_anything_else_is_refused(payload: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_command(payload)


@given(payloads=st.lists(st.binary(max_size=40)), cuts=st.lists(st.integers(1, 30)))
def test_a_stream_gives_its_messages_back_however_it_is_cut(payloads: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(frame(payload) for payload in payloads)
    reader, received, start = FrameReader(), [], 0
    for size in (*cuts, len(stream) + 1):
        received += list(reader.feed(stream[start : start + size]))
        start += size
    assert received == payloads


def test_a_length_that_nobody_sends_is_refused_before_memory_is_taken_for_it() -> None:
    with pytest.raises(FramingError):
        list(FrameReader().feed((MAX_PAYLOAD_BYTES + 1).to_bytes(4, "big")))
