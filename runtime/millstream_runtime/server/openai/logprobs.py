"""Log-probabilities in the formats of OpenAI's two routes and of vLLM's `prompt_logprobs`.

A token need not be valid text: byte-level vocabularies split characters. Its exact bytes are sent along with its text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millstream_runtime.engine.request import TokenLogprobs
from millstream_runtime.server.openai.logprob_entry import LogprobEntry, TokenBytes

LOWEST = -9999.0  # JSON has no minus infinity; OpenAI and vLLM send this


def chat_logprobs(entries: Sequence[LogprobEntry]) -> dict[str, list[Any]]:
    """The list in `choices[].logprobs` of a chat."""
    content = [
        {
            **_chat_entry(entry.token, entry.logprob if entry.logprob is not None else 0.0),
            "top_logprobs": [_chat_entry(token, logprob) for token, logprob in entry.top],
        }
        for entry in entries
    ]
    return {"content": content}


def completion_logprobs(entries: Sequence[LogprobEntry]) -> dict[str, list[Any]]:
    """`choices[].logprobs` of a completion: parallel lists. The chosen token is always among its alternatives."""
    return {
        "tokens": [token_text(entry.token) for entry in entries],
        "token_logprobs": [_finite(entry.logprob) if entry.logprob is not None else None for entry in entries],
        "top_logprobs": [_alternatives(entry) for entry in entries],
        "text_offset": [entry.text_offset for entry in entries],
    }


def prompt_logprobs(
    entries: Sequence[TokenLogprobs | None], token_bytes: TokenBytes
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's `prompt_logprobs`: for each prompt token `{id: {logprob, rank, decoded_token}}`, itself and the best."""
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
                    "decoded_token": token_bytes(token_id).decode(errors="replace"),
                }
                for token_id, logprob, rank in [*ranked, (entry.token_id, entry.logprob, entry.rank)]
            }
        )
    return shown


def token_text(token: bytes) -> str:
    """The token's text; `bytes:\\xf0\\x9f` for bytes that are not valid text, as OpenAI writes them."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _alternatives(entry: LogprobEntry) -> dict[str, float] | None:
    if entry.logprob is None:
        return None
    alternatives = {token_text(token): _finite(logprob) for token, logprob in entry.top}
    return {**alternatives, token_text(entry.token): _finite(entry.logprob)}


def _chat_entry(token: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(token)}


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
