"""Prompts to token ids and back, within the context of the loaded model, without blocking the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar

import msgspec

from millstream_runtime.engine_process.messages import ModelLimits
from millstream_runtime.rust_panics import RustPanic
from millstream_runtime.server.http import limits
from millstream_runtime.server.http.api_errors import ApiError, tokenizer_busy, tokenizer_failed
from millstream_runtime.server.openai.requests import DetokenizeRequest, Message, TokenizeRequest
from millstream_runtime.server.openai.sampling import context_length_exceeded, outside_vocabulary
from millstream_runtime.tokenizing.chat_template import ChatPromptTooLong, ChatTemplateError, ChatTemplateTooSlow
from millstream_runtime.tokenizing.text_growth import TextTooLong
from millstream_runtime.tokenizing.tokenizer import Tokenizer

Result = TypeVar("Result")


class PromptTokenizer:
    """Used on the event loop, which tokenises short prompts itself. Threads do the rest, with a time limit.

    A chat template is a program: however short the chat, it is rendered in a thread. Short chats have threads of their
    own, so that none waits for long prompts. One that takes long all the same starts again in the threads of long
    prompts, so that it keeps no other short chat waiting.
    """

    def __init__(
        self, tokenizer: Tokenizer, threads: Executor, short_threads: Executor, model_limits: Callable[[], ModelLimits]
    ) -> None:
        """`short_threads`: for short chats. `model_limits`: of the engine that serves now."""
        self.tokenizer = tokenizer
        self._threads = threads
        self._short_threads = short_threads
        self._model_limits = model_limits

    async def chat_ids(self, given: Sequence[Message], template_kwargs: Mapping[str, Any]) -> list[int]:
        """The tokens of a conversation. `template_kwargs`: variables for the chat template, as the client gave them.

        Raises:
            ApiError: no chat template, messages the template refuses, or too many characters for the context.
        """
        if not self.tokenizer.has_chat_template:
            raise ApiError(400, "This model has no chat template; use /v1/completions.", code="no_chat_template")
        messages = [message.for_template(self.tokenizer.takes_parts) for message in given]
        characters = sum(len(message.content) for message in given)
        self._require_plausible_length("messages", characters)
        # Four thousand empty messages have no characters, and take the template and the tokenizer 80 ms.
        characters += len(msgspec.json.encode(template_kwargs)) if template_kwargs else 0
        is_short = characters <= limits.SHORT_PROMPT_CHARACTERS and len(messages) <= limits.SHORT_CHAT_MESSAGES
        if is_short:
            short_seconds = limits.SHORT_CHAT_SECONDS
            try:
                return await _within_time(
                    self._short_threads, lambda: self._encode_chat(messages, template_kwargs, short_seconds)
                )
            except ChatTemplateTooSlow:
                pass
        try:
            return await _within_time(self._threads, lambda: self._encode_chat(messages, template_kwargs, None))
        except ChatTemplateTooSlow as error:
            raise ApiError(400, str(error), param="messages", code="prompt_too_complex") from error

    def _encode_chat(
        self, messages: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any], seconds: float | None
    ) -> list[int]:
        """Runs in a thread.

        Raises:
            ChatTemplateTooSlow: the template did not end in this time.
            ApiError: the template refuses the messages, or makes no usable prompt of them.
        """
        tokenizer, max_model_len = self.tokenizer, self._model_limits().max_model_len
        max_characters = max(limits.MAX_TOKENIZE_CHARACTERS, tokenizer.most_characters(max_model_len))
        try:
            token_ids = tokenizer.encode_chat(messages, template_kwargs, seconds, max_characters)
        except ChatTemplateTooSlow:
            raise
        except ChatPromptTooLong as error:
            least = f"at least {tokenizer.least_tokens(error.characters)}"
            raise context_length_exceeded("messages", least, None, max_model_len) from error
        except ChatTemplateError as error:
            raise ApiError(400, str(error), param="messages", code="invalid_messages") from error
        if not token_ids:
            nothing = "The model's chat template makes an empty prompt of these messages."
            raise ApiError(400, nothing, param="messages", code="invalid_messages")
        self._require_in_vocabulary("messages", [token_ids])
        return token_ids

    async def completion_ids(self, given: Sequence[str] | Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """The tokens of plain prompts; token ids are checked.

        Raises:
            ApiError: an empty prompt, an id outside the vocabulary, or too many characters for the context.
        """
        tokenizer = self.tokenizer
        lengths = [len(prompt) for prompt in given if isinstance(prompt, str)]
        self._require_plausible_length("prompt", max(lengths, default=0))
        prompts = await self._off_the_loop(
            lambda: [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in given], sum(lengths)
        )
        if not all(prompts):
            raise ApiError(400, "'prompt' is empty: it has no tokens.", param="prompt", code="invalid_value")
        await self._off_the_loop(lambda: self._require_in_vocabulary("prompt", prompts), sum(map(len, prompts)))
        return prompts

    async def texts(self, given: Sequence[str] | Sequence[Sequence[int]]) -> Sequence[str]:
        """The texts of prompts, for an echo."""
        tokenizer = self.tokenizer
        return await self._off_the_loop(
            lambda: [prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in given],
            sum(map(len, given)),
        )

    async def tokenize(self, request: TokenizeRequest) -> bytes:
        """The tokens that a generation would see, as the JSON of the response.

        Raises:
            ApiError: as for a generation.
        """
        tokenizer = self.tokenizer
        if request.messages is not None:
            token_ids = await self.chat_ids(request.messages, request.chat_template_kwargs)
        else:
            text, special = request.prompt or "", request.add_special_tokens
            token_ids = await self._off_the_loop(lambda: tokenizer.encode(text, add_special_tokens=special), len(text))

        def response() -> bytes:
            strings = None
            if request.return_token_strs:
                strings = [tokenizer.token_bytes(token_id).decode(errors="replace") for token_id in token_ids]
            sizes = {"count": len(token_ids), "max_model_len": self._model_limits().max_model_len}
            return msgspec.json.encode({**sizes, "tokens": token_ids, "token_strs": strings})

        return await self._off_the_loop(response, len(token_ids))

    async def detokenize(self, request: DetokenizeRequest) -> bytes:
        """The text of tokens, as the JSON of the response.

        Raises:
            ApiError: an id outside the vocabulary.
        """
        tokenizer = self.tokenizer
        length = len(request.tokens)
        await self._off_the_loop(lambda: self._require_in_vocabulary("tokens", [request.tokens]), length)
        return await self._off_the_loop(
            lambda: msgspec.json.encode({"prompt": tokenizer.decode(request.tokens)}), length
        )

    def _require_in_vocabulary(self, param: str, lists: Sequence[Sequence[int]]) -> None:
        vocab_size = self._model_limits().vocab_size
        if any(max(token_ids) >= vocab_size for token_ids in lists):
            raise outside_vocabulary(param, vocab_size)

    def _require_plausible_length(self, param: str, characters: int) -> None:
        """Refuse a prompt that is too long by its characters alone, before the cost of tokenising it."""
        least_tokens, max_model_len = self.tokenizer.least_tokens(characters), self._model_limits().max_model_len
        if least_tokens >= max_model_len:
            raise context_length_exceeded(param, f"at least {least_tokens}", None, max_model_len)

    async def _off_the_loop(self, work: Callable[[], Result], length: int) -> Result:
        """Run `work` in a thread with a time limit, so that one huge or hostile input never stalls other streams.

        With a small `length`, in characters or tokens, the work is done here: that is faster than a round trip to a
        thread, and waits for no long prompt or template there.
        """
        if length <= limits.SHORT_PROMPT_CHARACTERS:
            return _answerable(work)
        return await _within_time(self._threads, work)


async def _within_time(threads: Executor, work: Callable[[], Result]) -> Result:
    has_begun = False

    def begin() -> Result:
        nonlocal has_begun
        has_begun = True
        return _answerable(work)

    seconds = limits.TOKENIZE_TIMEOUT_SECONDS
    running = asyncio.get_running_loop().run_in_executor(threads, begin)
    try:
        return await asyncio.wait_for(running, seconds)
    except TimeoutError as error:
        if not has_begun:
            raise tokenizer_busy() from error
        raise ApiError(400, "The prompt took too long to tokenise.", code="prompt_too_complex") from error


def _answerable(work: Callable[[], Result]) -> Result:
    """Do `work`, and make what the tokenizer refuses or fails on an answer.

    Raises:
        ApiError: the text grows too much, or the tokenizer's library fails on it.
    """
    try:
        return work()
    except TextTooLong as error:
        raise ApiError(400, error.message, code="prompt_too_complex") from error
    except RustPanic as error:
        raise tokenizer_failed() from error
