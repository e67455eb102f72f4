"""Chat templates: messages to one string, by the model's own Jinja template.

The template comes from the model folder, never from a request, and runs in a sandbox with the helpers that
`transformers` gives it, so that the same messages give the same tokens (`template_environment`). What it may compute is
limited (`template_limits`). `transformers` itself is not imported: that alone would cost a second of every boot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jinja2

from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.tokenizing.content_form import TRIAL_CHATS, reads_parts, walks_parts, words_shown
from millstream_runtime.tokenizing.template_environment import TemplateEnvironment
from millstream_runtime.tokenizing.template_globals import RefusedByTemplate
from millstream_runtime.tokenizing.template_limits import (
    MAX_TEXT_CHARACTERS,
    RenderBudget,
    TemplateLimitExceeded,
    TemplateTimeExceeded,
)

MAX_MESSAGE_CHARACTERS = 2048  # of what a template says when it refuses messages
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
# What no client may give: variables and helpers of every template, and arguments of `apply_chat_template` of
# `transformers`, which some servers would read there.
RESERVED_VARIABLES = frozenset(
    {
        *("messages", "conversation", "tools", "documents", "chat_template"),
        *("add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
        *("range", "dict", "lipsum", "cycler", "joiner", "namespace", "raise_exception", "strftime_now"),
        *SPECIAL_TOKEN_NAMES,
    }
)


TRIAL_SECONDS = 5.0  # of a short chat while the model loads; a template that takes longer is judged by what it says


class ChatTemplateError(Exception):
    """These messages cannot be rendered; `str()` is fit for the client."""


class ChatTemplateTooSlow(ChatTemplateError):
    """The template has not ended in its time."""


class ChatPromptTooLong(ChatTemplateError):
    """The template made more characters of the messages than the caller takes."""

    def __init__(self, characters: int) -> None:
        super().__init__(f"The model's chat template makes {characters} characters of these messages.")
        self.characters = characters


class ChatTemplate:
    """A compiled template and the special tokens it may name (`bos_token` and friends).

    Raises:
        RuntimeFailure: the template is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], file: str = "") -> None:
        """`file`: it has the template; for messages."""
        where = f"{file}: the chat template" if file else "The model's chat template"
        self._environment = TemplateEnvironment()
        try:
            self._template = self._environment.from_string(source)
            parsed = self._environment.parse(source)
            walks, may_take_parts = walks_parts(parsed), reads_parts(parsed)
        except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError) as error:  # too deep, for some
            raise RuntimeFailure(FailureReason.CHECKPOINT_INVALID, f"{where} is not valid Jinja: {error}.") from error
        # Jinja would copy its globals name by name, through two layers, for every conversation.
        self._constants = {
            **self._template.globals,
            **special_tokens,
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        self._template.globals = {}
        self._takes_parts = walks
        if walks or may_take_parts:
            self._takes_parts = self._form_of_trials(walks, where)

    @property
    def takes_parts(self) -> bool:
        """Whether a message's content is a list of parts for this template, else a text."""
        return self._takes_parts

    def _form_of_trials(self, walks: bool, where: str) -> bool:
        """Whether more of a chat's words show where their form is a list of parts; as the template says, for none."""
        try:
            texts, parts = ([self._trial(chat, as_parts) for chat in TRIAL_CHATS] for as_parts in (False, True))
        except ChatTemplateTooSlow:
            return walks
        if words_shown(texts) or words_shown(parts):
            return words_shown(parts) > words_shown(texts)
        if walks and any(prompt is not None for prompt in parts):
            raise RuntimeFailure(
                FailureReason.CHECKPOINT_INVALID,
                f"{where} leaves out what the user says, as a text and as a list of text parts; correct the template.",
            )
        return walks

    def _trial(self, chat: Sequence[Mapping[str, str]], as_parts: bool) -> str | None:
        """The prompt of a chat; None where the template refuses it."""
        try:
            return self._render([_in_form(message, as_parts) for message in chat], {}, TRIAL_SECONDS)
        except ChatTemplateTooSlow:
            raise
        except ChatTemplateError:
            return None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any] = MappingProxyType({}),
        seconds: float | None = None,
    ) -> str:
        """The prompt up to and including the header of the assistant's next turn.

        `template_kwargs`: further variables, as plain JSON. They replace none of the server's. `seconds`: of time, if
        less than MAX_RENDER_SECONDS.

        Raises:
            ChatTemplateTooSlow: the template has not ended in this time.
            ChatTemplateError: the template refused the messages, or asked for more than a limit allows.
        """
        return self._render([_in_form(message, self._takes_parts) for message in messages], template_kwargs, seconds)

    def _render(self, messages: list[dict[str, Any]], template_kwargs: Mapping[str, Any], seconds: float | None) -> str:
        variables = {**template_kwargs, **self._constants, "messages": messages}
        renders = self._environment.renders
        renders.budget = RenderBudget(seconds)
        try:
            return self._rendered(self._template.new_context(variables, shared=True), renders.budget)
        except TemplateTimeExceeded as error:
            raise ChatTemplateTooSlow("The model's chat template takes too long to render the messages.") from error
        except TemplateLimitExceeded as error:
            raise ChatTemplateError(str(error)) from error
        except ChatTemplateError:
            raise
        except RefusedByTemplate as error:
            message = (error.message or "")[:MAX_MESSAGE_CHARACTERS]
            raise ChatTemplateError(f"The model's chat template refused the messages: {message}") from error
        except Exception as error:
            # The template is a program: whatever it raises (RecursionError, for one) is its own, an internal detail.
            given = "these messages with these chat_template_kwargs" if template_kwargs else "these messages"
            raise ChatTemplateError(f"The model's chat template cannot render {given}.") from error

    def _rendered(self, context: jinja2.runtime.Context, budget: RenderBudget) -> str:
        pieces: list[str] = []
        characters = 0
        for piece in self._template.root_render_func(context):
            characters += len(piece)
            if characters > MAX_TEXT_CHARACTERS:
                raise ChatTemplateError("The rendered messages are too long.")
            budget.charge_piece(piece)
            pieces.append(piece)
        return "".join(pieces)


def _in_form(message: Mapping[str, Any], as_parts: bool) -> dict[str, Any]:
    content = message.get("content")
    if as_parts and isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content}]}
    return dict(message)
