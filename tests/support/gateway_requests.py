"""Requests and replicas as the gateway's picker sees them, for tests."""

from __future__ import annotations

from dataclasses import replace

from millstream_gateway.replica_report import Replica, ReplicaReport
from millstream_gateway.routed_request import RoutedRequest, routed_request

IDLE = ReplicaReport("boot-1", "Ready", 0, 0, 0, 0, 4096, 4096, 16, prefill_tokens_per_second=1000.0, itl_seconds=0.010)


def chat(*texts: str, request_id: str = "r", api_key: str = "", salt: str = "", system: str = "") -> RoutedRequest:
    """Return a conversation: `texts` are user and assistant messages in turn."""
    roles = ("user", "assistant")
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
    body = {"messages": messages, **({"cache_salt": salt} if salt else {})}
    return routed_request(request_id, "demo", body, api_key)


def text_of(num_bytes: int, word: str = "word") -> str:
    """Return a text of this size; another word, another text from the first byte on."""
    return (f"{word} " * (num_bytes // (len(word) + 1) + 1))[:num_bytes]


def idle_replicas(number: int, at_seconds: float = 0.0) -> list[Replica]:
    """Return replicas that have nothing to do."""
    return [Replica(f"10.0.0.{index}:8000", IDLE, at_seconds) for index in range(1, number + 1)]


def with_report(replica: Replica, **changes: object) -> Replica:
    """Return the replica with fields of its report changed."""
    assert replica.report is not None
    return replace(replica, report=replace(replica.report, **changes))  # type: ignore[arg-type]
