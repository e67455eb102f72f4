"""The text of a request in one form, so that two requests share a prefix here where their tokens share one there.

Per message one line of JSON with sorted keys, the tools before the first: that is where chat templates put them. The
text is never shown to a model, so it need not be what a template makes of it. It must only grow at its end when a
conversation does, and differ where prompts differ.
"""

from __future__ import annotations

import json
from typing import Any

SYSTEM_ROLES = ("system", "developer")


class BodyError(ValueError):
    """A request's body has no prompt that could be routed; the message names the field."""


def canonical_text(body: dict[str, Any]) -> bytes:
    """Return the text of a chat or a completion.

    Raises:
        BodyError: it has neither `messages` nor `prompt`, or they have another type than the API gives them.
    """
    if "messages" in body:
        tools = [_line({"tools": body["tools"]})] if body.get("tools") else []
        return b"".join([*tools, *map(_message_line, _messages(body))])
    return _prompt(body)


def conversation_start(body: dict[str, Any]) -> bytes:
    """Return what all turns of one conversation share, and other conversations do not: system prompt, first message.

    Of the whole prompt the second turn would differ; of the system prompt alone all users of one application would
    be the same.

    Raises:
        BodyError: as `canonical_text`.
    """
    if "messages" not in body:
        return _prompt(body)
    kept = []
    for message in _messages(body):
        kept.append(_message_line(message))
        if message.get("role") not in SYSTEM_ROLES:
            break
    return b"".join(kept)


def _messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    messages = body["messages"]
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise BodyError("messages must be a list of at least one object")
    return messages


def _message_line(message: dict[str, Any]) -> bytes:
    content = message.get("content")
    if isinstance(content, list) and all(_is_text(part) for part in content):
        message = {**message, "content": "".join(part["text"] for part in content)}
    return _line(message)


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.keys() == {"type", "text"} and isinstance(part["text"], str)


def _prompt(body: dict[str, Any]) -> bytes:
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return prompt.encode("utf-8", "surrogatepass")
    if isinstance(prompt, list) and prompt:
        return _line(prompt)[1:]  # without the bracket, so that a longer list begins as a shorter one does
    raise BodyError("the body has neither messages nor a prompt that is a text or a list")


def _line(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass") + b"\n"
