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

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._environment = TemplateEnvironment()
        try:
            self._template = self._environment.from_string(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError) as error:  # too deep, for some
            raise RuntimeFailure(
                FailureReason.CHECKPOINT_INVALID, f"The model's chat template is not valid Jinja: {error}."
            ) from error
        # Jinja would copy its globals name by name, through two layers, for every conversation.
        self._constants = {
            **self._template.globals,
            **special_tokens,
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        self._template.globals = {}

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
        variables = {**template_kwargs, **self._constants, "messages": [dict(message) for message in messages]}
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
