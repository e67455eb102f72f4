"""Chats with a server in a thread: a body with defaults, open streams, requests in the background."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx

from tests.support.server_thread import ServerThread

CHAT = "/v1/chat/completions"


def chat_body(**overrides: Any) -> dict[str, Any]:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 400,
        "temperature": 0,
        "ignore_eos": True,
    }
    return {**body, **overrides}


@contextmanager
def events_of(server: ServerThread, body: dict[str, Any]) -> Iterator[Iterator[str]]:
    """An open stream, event by event."""
    with httpx.stream("POST", server.url + CHAT, json={**body, "stream": True}, timeout=60) as answer:
        assert answer.status_code == 200
        yield (line.removeprefix("data: ") for line in answer.iter_lines() if line)


def in_background(work: Callable[[], Any]) -> Any:
    return ThreadPoolExecutor(1).submit(work)
