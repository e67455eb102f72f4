"""Chat templates: messages to one string, by the model's own Jinja template.

The template comes from the model folder, never from a request, and runs in Jinja's immutable sandbox with the
same few helpers that `transformers` gives it (`tojson`, `raise_exception`, `strftime_now`, loop controls and the
`{% generation %}` tag), so that the same messages give the same tokens. `transformers` itself is not imported: that
alone would cost a second of every boot.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from millstream_runtime.errors import FailureReason, RuntimeFailure

MAX_RENDERED_CHARACTERS = 16 << 20
MAX_RENDER_SECONDS = 30.0  # a server waits no longer, and its thread is needed for other chats
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


class ChatTemplate:
    """A compiled template and the special tokens it may name (`bos_token` and friends).

    Raises:
        RuntimeFailure: the template is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
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
        self, messages: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any] = MappingProxyType({})
    ) -> str:
        """The prompt up to and including the header of the assistant's next turn.

        `template_kwargs`: further variables, as plain JSON. They replace none of the server's.

        Raises:
            ChatTemplateError: the template refused the messages, its output is longer than any context, or it has not
                ended after MAX_RENDER_SECONDS. The time is looked at between two pieces of output.
        """
        pieces: list[str] = []
        characters, deadline_seconds = 0, time.monotonic() + MAX_RENDER_SECONDS
        variables = {**template_kwargs, **self._constants, "messages": [dict(message) for message in messages]}
        context = self._template.new_context(variables, shared=True)
        try:
            for piece in self._template.root_render_func(context):
                characters += len(piece)
                if characters > MAX_RENDERED_CHARACTERS:
                    raise ChatTemplateError("The rendered messages are too long.")
                if time.monotonic() > deadline_seconds:
                    raise ChatTemplateError("The model's chat template takes too long to render the messages.")
                pieces.append(piece)
        except ChatTemplateError:
            raise
        except _RefusedByTemplate as error:
            raise ChatTemplateError(f"The model's chat template refused the messages: {error.message}") from error
        except Exception as error:
            # The template is a program: whatever it raises (RecursionError, for one) is its own, an internal detail.
            given = "these messages with these chat_template_kwargs" if template_kwargs else "these messages"
            raise ChatTemplateError(f"The model's chat template cannot render {given}.") from error
        return "".join(pieces)


class _RefusedByTemplate(jinja2.TemplateError):
    """The template called `raise_exception`: its message is meant for the caller."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PlainNamespace(jinja2.utils.Namespace):
    """Jinja's `namespace` without underscore names, which could reach CPython's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # the same signature trick as Jinja's own
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"A template may not set {name!r} on a namespace.")


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _PlainNamespace
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise _RefusedByTemplate(str(message))


def _strftime_now(format_: str) -> str:
    return datetime.now().strftime(format_)
