"""Failures that a person must act on, with a stable reason and one sentence.

The operator shows `reason` and `message` as a condition of the LLMDeployment, and `millstream serve` prints the
message. So the message says what is wrong and what to do, and no traceback follows it.
"""

from __future__ import annotations

import json
from enum import StrEnum

TERMINATION_MESSAGE_LIMIT_BYTES = 4096  # the kubelet cuts a termination message here


class FailureReason(StrEnum):
    """Stable CamelCase reasons; the operator copies them to `status.conditions[].reason`."""

    API_KEYS_INVALID = "APIKeysInvalid"
    BENCHMARK_FAILED = "BenchmarkFailed"  # of `millstream bench` only: no pod ends with it
    CHECKPOINT_INVALID = "CheckpointInvalid"
    DISK_FULL = "DiskFull"
    DOWNLOAD_FAILED = "DownloadFailed"
    DOWNLOAD_UNAUTHORIZED = "DownloadUnauthorized"
    INVALID_CONFIG = "InvalidConfig"
    NCCL_FAILED = "NCCLFailed"  # ranks lost each other, by NCCL on GPUs or gloo on CPUs
    OUT_OF_MEMORY = "OutOfMemory"
    PORT_IN_USE = "PortInUse"
    RUNTIME_CRASHED = "RuntimeCrashed"
    UNSUPPORTED_BY_RUNTIME = "UnsupportedByRuntime"
    WARMUP_STALLED = "WarmupStalled"


class RuntimeFailure(Exception):
    """The runtime cannot continue. `str()` is one sentence for a person; `reason` is for machines."""

    def __init__(self, reason: FailureReason, message: str) -> None:
        """`message`: what it quotes of a file may hold any character; those that are not printable are escaped."""
        self.reason = reason
        self.message = _one_line(message)
        super().__init__(self.message)

    def termination_message(self) -> str:
        """JSON for the pod's termination log, at most `TERMINATION_MESSAGE_LIMIT_BYTES` of UTF-8."""
        message = self.message
        while True:
            text = json.dumps({"reason": self.reason.value, "message": message}, ensure_ascii=False)
            excess_bytes = len(text.encode()) - TERMINATION_MESSAGE_LIMIT_BYTES
            if excess_bytes <= 0:
                return text
            message = message[: -max(1, excess_bytes // 4)]


class InvalidConfigError(RuntimeFailure):
    """A flag or a field has a value that cannot work."""

    def __init__(self, message: str) -> None:
        super().__init__(FailureReason.INVALID_CONFIG, message)


def _one_line(message: str) -> str:
    """Without control characters, and without halves of UTF-16 pairs, which no UTF-8 file takes."""
    if message.isprintable():
        return message
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in message)
