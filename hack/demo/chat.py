"""One streamed chat answer over plain HTTP, to show that nothing but the OpenAI API is needed."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass

from hack.demo.tools import DemoError

_TIMEOUT_SECONDS = 60.0


@dataclass(slots=True)
class Timing:
    """How the answer came. Filled while it streams."""

    first_token_seconds: float = 0.0
    total_seconds: float = 0.0
    tokens: int = 0


def stream_answer(port: int, model: str, question: str, timing: Timing, *, max_tokens: int = 128) -> Iterator[str]:
    """Yield the answer piece by piece, as the server sends it."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_SECONDS)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise DemoError(f"The model answered {response.status}: {response.read(500).decode(errors='replace')}")
        for line in response:
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix(b"data: "))
            timing.tokens = (chunk.get("usage") or {}).get("completion_tokens", timing.tokens)
            for choice in chunk.get("choices", []):
                if text := choice.get("delta", {}).get("content"):
                    timing.first_token_seconds = timing.first_token_seconds or time.monotonic() - began
                    yield text
        timing.total_seconds = time.monotonic() - began
    except (OSError, http.client.HTTPException) as error:
        raise DemoError(f"The connection to the Service broke: {error or type(error).__name__}.") from None
    finally:
        connection.close()
