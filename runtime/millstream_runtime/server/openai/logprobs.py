"""Log-probabilities as OpenAI's two routes and vLLM's `prompt_logprobs` word them.

A token need not be text: byte-level vocabularies split characters. Its exact bytes go out beside a readable spelling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millstream_runtime.engine.request import TokenLogprobs
from millstream_runtime.server.openai.choice import ShownToken, Spell

LOWEST = -9999.0  # JSON has no minus infinity; OpenAI and vLLM write this


def chat_logprobs(tokens: Sequence[ShownToken] | None) -> dict[str, Any] | None:
    """`choices[].logprobs` of a chat."""
    if tokens is None:
        return None
    content = [
        {
            **_spelled(token.spelling, token.logprob if token.logprob is not None else 0.0),
            "top_logprobs": [_spelled(spelling, logprob) for spelling, logprob in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[ShownToken] | None) -> dict[str, Any] | None:
    """`choices[].logprobs` of a completion: parallel lists. The chosen token is always among its alternatives."""
    if tokens is None:
        return None
    return {
        "tokens": [readable(token.spelling) for token in tokens],
        "token_logprobs": [_finite(token.logprob) if token.logprob is not None else None for token in tokens],
        "top_logprobs": [_alternatives(token) for token in tokens],
        "text_offset": [token.text_offset for token in tokens],
    }


def prompt_logprobs(
    entries: Sequence[TokenLogprobs | None] | None, spell: Spell
) -> list[dict[str, dict[str, Any]] | None] | None:
    """vLLM's `prompt_logprobs`: for each prompt token `{id: {logprob, rank, decoded_token}}`, itself and the best."""
    if entries is None:
        return None
    shown: list[dict[str, dict[str, Any]] | None] = []
    for entry in entries:
        if entry is None:
            shown.append(None)
            continue
        ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, start=1)]
        shown.append(
            {
                str(token_id): {
                    "logprob": _finite(logprob),
                    "rank": rank,
                    "decoded_token": spell(token_id).decode(errors="replace"),
                }
                for token_id, logprob, rank in [*ranked, (entry.token_id, entry.logprob, entry.rank)]
            }
        )
    return shown


def readable(spelling: bytes) -> str:
    """The token's text; for bytes that are no text `bytes:\\xf0\\x9f`, as OpenAI wrote them."""
    try:
        return spelling.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)


def _alternatives(token: ShownToken) -> dict[str, float] | None:
    if token.logprob is None:
        return None
    listed = {readable(spelling): _finite(logprob) for spelling, logprob in token.top}
    return {**listed, readable(token.spelling): _finite(token.logprob)}


def _spelled(spelling: bytes, logprob: float) -> dict[str, Any]:
    return {"token": spelling.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(spelling)}


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
