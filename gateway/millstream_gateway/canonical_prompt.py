"""The prompt of a request in one form, so that two requests share a prefix here where their tokens share one there.

Per message one line of JSON with sorted keys behind its role, the tools before the first: that is where chat templates
put them. The text is never shown to a model, so it need not be what a template makes of it. It must only grow at its
end when a conversation does, and differ where prompts differ.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

SYSTEM_ROLES = ("system", "developer")


class BodyError(ValueError):
    """A request's body has no prompt that could be routed; the message names the field."""


@dataclass(frozen=True, slots=True)
class CanonicalPrompt:
    """`start`: what all turns of a conversation have in common and other conversations have not.

    That is the system prompt and the first message. Of the whole prompt the second turn would differ; of the system
    prompt alone all users of one application would be the same. `previous_bytes`: of the text that was the prompt of
    the turn before; 0 for a first turn.
    """

    text: bytes
    start: bytes
    previous_bytes: int


def canonical_prompt(body: dict[str, Any]) -> CanonicalPrompt:
    """Return the prompt of a chat or a completion.

    Raises:
        BodyError: it has neither `messages` nor `prompt`, or they have another type than the API gives them.
    """
    if "messages" not in body:
        text = _prompt_text(body)
        return CanonicalPrompt(text, text, 0)
    messages = body["messages"]
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise BodyError("messages must be a list of at least one object")
    roles = [message.get("role") for message in messages]
    lines = [_message_line(message) for message in messages]
    first = next((index for index, role in enumerate(roles) if role not in SYSTEM_ROLES), len(roles) - 1)
    tools = _line({"tools": body["tools"]}) if body.get("tools") else b""
    last_answer = max((index for index, role in enumerate(roles) if role == "assistant"), default=0)
    previous_bytes = len(tools) + sum(map(len, lines[:last_answer])) if last_answer else 0
    return CanonicalPrompt(b"".join([tools, *lines]), b"".join(lines[: first + 1]), previous_bytes)


def _message_line(message: dict[str, Any]) -> bytes:
    """Return the line of a message; a list of texts is the same prompt as one text."""
    content = message.get("content")
    if isinstance(content, list) and all(_is_text(part) for part in content):
        content = "".join(part["text"] for part in content)
    others = {name: value for name, value in message.items() if name not in ("role", "content")}
    return _line([message.get("role"), content, others])


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.keys() == {"type", "text"} and isinstance(part["text"], str)


def _prompt_text(body: dict[str, Any]) -> bytes:
    prompt = body.get("prompt")
    if isinstance(prompt, str) and prompt:
        return prompt.encode("utf-8", "surrogatepass")
    if isinstance(prompt, list) and prompt:
        return _line(prompt)[1:]  # without the bracket: a longer list begins as a shorter one does
    raise BodyError("the body has neither messages nor a prompt that is a text or a list")


def _line(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass") + b"\n"
