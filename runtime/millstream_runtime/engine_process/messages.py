"""Messages between the HTTP process and the engine process: typed, msgpack, never pickle.

    Load ─► (PhaseEntered | WeightsRead)* ─► Loaded ─► Ready ─► (Submit | Abort ─► StepDone | Refused)* ─► Stop
                                                               PromptLogprobs*: before the StepDone of a long prompt
                                  anywhere: Failed, and the process ends

The engine's own dataclasses (`Request`, `TokenOutput`, `EngineStats`) are sent as they are, so there is no second set
of types to keep in step. Decoding checks every field's type. Moments are `time.monotonic()`, which all processes of a
machine share.
"""

from __future__ import annotations

import msgspec

from millstream_runtime.boot import WeightsProgress
from millstream_runtime.config import GovernorMode, RuntimeConfig
from millstream_runtime.distributed.topology import Topology
from millstream_runtime.engine.kernel_backends import KernelChoice, LinearChoice
from millstream_runtime.engine.kv.pool_size import MemoryUse
from millstream_runtime.engine.request import EngineStats, Request, TokenLogprobs, TokenOutput
from millstream_runtime.engine.step_times import TimedStep
from millstream_runtime.errors import FailureReason, RuntimeFailure


class ModelLimits(msgspec.Struct, frozen=True):
    """What the server needs to know about the loaded model."""

    max_model_len: int
    vocab_size: int


class Load(msgspec.Struct, frozen=True, tag=True):
    """The first command, sent once: build this engine."""

    config: RuntimeConfig


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Queue a generation."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End a generation early. Unknown and finished ids are no error: the last token may be in flight."""

    request_id: str


class SetHeartbeatInterval(msgspec.Struct, frozen=True, tag=True):
    """How long the engine may be idle before it runs a heartbeat; 0: no heartbeats."""

    seconds: float


class SetTargetItl(msgspec.Struct, frozen=True, tag=True):
    """How long a step with prompts may make running answers wait; None: what the engine was started with."""

    milliseconds: int | None


class SetSpeculationGovernor(msgspec.Struct, frozen=True, tag=True):
    """Whether measured gains decide how many drafts are checked."""

    mode: GovernorMode


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End after the current step."""


class PhaseEntered(msgspec.Struct, frozen=True, tag=True):
    """The boot entered a phase; `phase` is a value of `boot.Phase`."""

    phase: str
    message: str


class WeightsRead(msgspec.Struct, frozen=True, tag=True):
    """More of the checkpoint is read; sent a few times per second and at the end."""

    progress: WeightsProgress


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The weights are read and the KV pool is sized; the warm-up comes next."""

    limits: ModelLimits
    topology: Topology | None = None  # of several ranks
    memory: MemoryUse | None = None
    kernels: tuple[KernelChoice, ...] = ()
    kernel_lookups: dict[str, int] = {}  # variants that were compiled ahead, by result
    linears: tuple[LinearChoice, ...] = ()


class StepThreads(msgspec.Struct, frozen=True):
    """Number of threads with which a CPU computes steps of at most `most_tokens` tokens; None: of any more."""

    most_tokens: int | None
    threads: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The first steps have run."""

    stats: EngineStats
    at_seconds: float
    warm_up_seconds: float
    threads: tuple[StepThreads, ...] = ()  # as the warm-up chose them, from small steps to large ones
    step_times: tuple[TimedStep, ...] = ()


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """The result of one step: the tokens of users, and the moment they left the engine."""

    outputs: tuple[TokenOutput, ...]
    stats: EngineStats
    at_seconds: float
    heartbeat_seconds: float | None = None  # duration of the heartbeat that ended with this step
    taken_requests: int = 0  # how many `Submit`s the engine has taken, and how many tokens their prompts had:
    taken_tokens: int = 0  # what `stats` knows nothing of is what was sent beyond them


class PromptLogprobs(msgspec.Struct, frozen=True, tag=True):
    """A part of a long prompt's log-probabilities, ahead of the step that ends its prefill: see `prompt_parts`."""

    request_id: str
    entries: tuple[TokenLogprobs | None, ...]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The engine rejects one request; the others go on."""

    request_id: str
    message: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The last event: the engine cannot go on, and the process ends."""

    reason: FailureReason
    message: str

    def failure(self) -> RuntimeFailure:
        return RuntimeFailure(self.reason, self.message)


Command = Load | Submit | Abort | SetHeartbeatInterval | SetTargetItl | SetSpeculationGovernor | Stop
Event = PhaseEntered | WeightsRead | Loaded | Ready | PromptLogprobs | StepDone | Refused | Failed

_encoder = msgspec.msgpack.Encoder()
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_events: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def encode(message: Command | Event) -> bytes:
    """A message as msgpack."""
    return _encoder.encode(message)


def decode_command(payload: bytes | memoryview) -> Command:
    """Raises msgspec.DecodeError: not a command, or a field of another type."""
    return _commands.decode(payload)


def decode_event(payload: bytes | memoryview) -> Event:
    """Raises msgspec.DecodeError: not an event, or a field of another type."""
    return _events.decode(payload)
