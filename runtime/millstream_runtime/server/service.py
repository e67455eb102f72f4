"""The state that all routes share, and the way of a request from its JSON to a running Generation."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from millstream_runtime.boot import BootLedger, Phase
from millstream_runtime.config import RuntimeConfig
from millstream_runtime.engine_process.messages import ModelLimits
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.logs import log
from millstream_runtime.server.engine.client import EngineClient, LaunchEngine
from millstream_runtime.server.engine.watchdog import NO_PROGRESS_SECONDS, STUCK_SECONDS
from millstream_runtime.server.http import limits
from millstream_runtime.server.http.api_errors import ApiError, engine_failed, unavailable
from millstream_runtime.server.http.api_keys import ApiKeys
from millstream_runtime.server.openai.generation import Generation, GenerationPlan
from millstream_runtime.server.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    Message,
    TokenizeRequest,
)
from millstream_runtime.server.openai.sampling import (
    SamplingDefaults,
    context_length_exceeded,
    outside_vocabulary,
    require_in_vocabulary,
    sampling_params,
)
from millstream_runtime.server.operations.admission import Admission
from millstream_runtime.server.operations.metrics import ServerMetrics
from millstream_runtime.server.operations.traces import RequestTraces
from millstream_runtime.tokenizing.chat_template import ChatTemplateError
from millstream_runtime.tokenizing.tokenizer import Tokenizer

Result = TypeVar("Result")


class Service:
    """Made before anything is loaded: `start` begins to load the tokenizer and the engine, while HTTP listens."""

    def __init__(
        self,
        config: RuntimeConfig,
        ledger: BootLedger,
        launch_engine: LaunchEngine,
        *,
        on_failure: Callable[[RuntimeFailure], None],
        restart_delays_seconds: Sequence[float],
        no_progress_seconds: float = NO_PROGRESS_SECONDS,
        stuck_seconds: float = STUCK_SECONDS,
    ) -> None:
        """Raises InvalidConfigError: the file of API keys cannot be used."""
        self.config = config
        self.ledger = ledger
        self.created_at = int(time.time())
        self.engine = EngineClient(
            launch_engine,
            ledger,
            on_failure=on_failure,
            heartbeat_interval_seconds=config.heartbeat_interval_seconds,
            restart_delays_seconds=restart_delays_seconds,
            no_progress_seconds=no_progress_seconds,
            stuck_seconds=stuck_seconds,
        )
        self.engine.on_ready = self._enter_ready
        self.metrics = ServerMetrics(config.served_model_name, ledger, self.engine)
        self.admission = Admission(config.max_num_seqs + limits.max_waiting_requests(config.max_num_seqs))
        self.api_keys = ApiKeys(Path(config.api_keys_file)) if config.api_keys_file is not None else None
        self.traces = RequestTraces.from_environment(config.served_model_name)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenizer")
        self.body_threads = ThreadPoolExecutor(1, thread_name_prefix="bodies")
        self._tokenizer: Tokenizer | None = None
        self._defaults = SamplingDefaults()

    def start(self) -> None:
        """Begin to load, on the event loop; the ledger tells how far it is."""
        self.engine.start()
        self._loading = asyncio.get_running_loop().create_task(self._load_tokenizer())

    async def _load_tokenizer(self) -> None:
        folder = Path(self.config.model)

        def load() -> tuple[Tokenizer, SamplingDefaults]:
            return Tokenizer.from_folder(folder), SamplingDefaults.from_folder(folder)

        try:
            self._tokenizer, self._defaults = await asyncio.get_running_loop().run_in_executor(self._threads, load)
        except RuntimeFailure as failure:
            self.engine.give_up(failure)
        except Exception as error:  # a bug; the sentence must not hide it
            log.error("tokenizer_crashed", traceback="".join(traceback.format_exception(error)))
            message = f"The tokenizer in {folder} cannot be loaded ({type(error).__name__}); see the log."
            self.engine.give_up(RuntimeFailure(FailureReason.CHECKPOINT_INVALID, message))
        else:
            self._enter_ready()

    def _enter_ready(self) -> None:
        if self.engine.is_ready and self._tokenizer is not None:
            self.ledger.enter(Phase.READY)

    def require_ready(self, model: str | None) -> None:
        """Raises ApiError: 503 before Ready and while there is no engine, 404 for another model."""
        if self.engine.failure is not None:
            raise engine_failed()
        phase = self.ledger.phase
        if phase is Phase.UNRESPONSIVE:
            raise unavailable("The engine does not respond; try again.", "engine_unresponsive")
        if phase not in (Phase.READY, Phase.DRAINING):
            raise unavailable(f"The model is not ready yet ({phase.value}); try again.", "model_loading")
        if model is not None:
            self.require_model(model)

    def require_model(self, model: str) -> None:
        if model != self.config.served_model_name:
            raise ApiError(
                404,
                f"The model '{model[:200]}' does not exist; this server serves '{self.config.served_model_name}'.",
                param="model",
                code="model_not_found",
            )

    async def chat(self, request: ChatCompletionRequest, arrived_at_seconds: float, tenant: str) -> Generation:
        """Render and tokenise a conversation.

        Raises:
            ApiError: no chat template, messages the template refuses, or a context overflow.
        """
        prompt = await self.chat_ids(request.messages)
        return self._generation(request, [prompt], (), arrived_at_seconds, tenant)

    async def completion(self, request: CompletionRequest, arrived_at_seconds: float, tenant: str) -> Generation:
        """Tokenise plain prompts, or check token ids.

        Raises:
            ApiError: an empty prompt, an id outside the vocabulary, or a context overflow.
        """
        tokenizer = self._loaded_tokenizer()
        given = request.prompt
        self._refuse_hopeless("prompt", max((len(prompt) for prompt in given if isinstance(prompt, str)), default=0))
        prompts = await self._off_the_loop(
            lambda: [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in given],
            sum(len(prompt) for prompt in given if isinstance(prompt, str)),
        )
        if not all(prompts):
            raise ApiError(400, "'prompt' is empty: it has no tokens.", param="prompt", code="invalid_value")
        await self._off_the_loop(lambda: self._require_in_vocabulary("prompt", prompts))
        echoes: Sequence[str] = ()
        if request.echo:
            echoes = await self._off_the_loop(
                lambda: [prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in given]
            )
        return self._generation(request, prompts, echoes, arrived_at_seconds, tenant)

    async def chat_ids(self, given: Sequence[Message]) -> list[int]:
        """The tokens of a conversation.

        Raises:
            ApiError: no chat template, messages the template refuses, or too many characters for the context.
        """
        tokenizer = self._loaded_tokenizer()
        if not tokenizer.has_chat_template:
            raise ApiError(400, "This model has no chat template; use /v1/completions.", code="no_chat_template")
        messages = [message.for_template() for message in given]
        characters = sum(len(message["content"]) for message in messages)
        self._refuse_hopeless("messages", characters)
        try:
            return await self._off_the_loop(
                lambda: tokenizer.encode_chat(messages), characters + limits.MESSAGE_CHARACTERS * len(messages)
            )
        except ChatTemplateError as error:
            raise ApiError(400, str(error), param="messages", code="invalid_messages") from error

    async def tokenize(self, request: TokenizeRequest) -> bytes:
        """The tokens that a generation would see, as the JSON of the answer.

        Raises:
            ApiError: as for a generation.
        """
        tokenizer = self._loaded_tokenizer()
        if request.messages is not None:
            token_ids = await self.chat_ids(request.messages)
        else:
            text, special = request.prompt or "", request.add_special_tokens
            token_ids = await self._off_the_loop(lambda: tokenizer.encode(text, add_special_tokens=special))

        def answer() -> bytes:
            strings = None
            if request.return_token_strs:
                strings = [tokenizer.token_bytes(token_id).decode(errors="replace") for token_id in token_ids]
            sizes = {"count": len(token_ids), "max_model_len": self._limits().max_model_len}
            return msgspec.json.encode({**sizes, "tokens": token_ids, "token_strs": strings})

        return await self._off_the_loop(answer)

    async def detokenize(self, request: DetokenizeRequest) -> bytes:
        """The text of tokens, as the JSON of the answer.

        Raises:
            ApiError: an id outside the vocabulary.
        """
        tokenizer = self._loaded_tokenizer()
        await self._off_the_loop(lambda: self._require_in_vocabulary("tokens", [request.tokens]))
        return await self._off_the_loop(lambda: msgspec.json.encode({"prompt": tokenizer.decode(request.tokens)}))

    def close(self) -> None:
        if self.traces is not None:
            self.traces.close()
        for threads in (self._threads, self.body_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    def _generation(
        self,
        request: ChatCompletionRequest | CompletionRequest,
        prompts: Sequence[Sequence[int]],
        echoes: Sequence[str],
        arrived_at_seconds: float,
        tenant: str,
    ) -> Generation:
        require_in_vocabulary(request, self._limits().vocab_size)
        sampling = [
            sampling_params(
                request,
                self._defaults,
                prompt_tokens=len(prompt),
                max_model_len=self._limits().max_model_len,
            )
            for prompt in prompts
        ]
        plan = GenerationPlan(
            prompts=prompts,
            sampling=sampling,
            num_candidates=request.num_candidates,
            num_shown=request.n,
            stops=request.stop,
            echoes=echoes,
            shows_logprobs=request.num_logprobs is not None,
            shows_prompt_logprobs=isinstance(request, CompletionRequest) and request.prompt_logprobs is not None,
            drops_answer=request.token_limit == 0,
            priority=request.priority,
            # Holders of different keys never share a prefix; whoever shares a key may be told apart by a salt.
            cache_salt=f"{tenant}\n{request.cache_salt or ''}",
        )
        return Generation(self.engine, self._loaded_tokenizer(), self.metrics, plan, arrived_at_seconds)

    def _require_in_vocabulary(self, param: str, lists: Sequence[Sequence[int]]) -> None:
        if any(max(token_ids) >= self._limits().vocab_size for token_ids in lists):
            raise outside_vocabulary(param, self._limits().vocab_size)

    def _refuse_hopeless(self, param: str, characters: int) -> None:
        """Refuse what is too long for the context by its characters alone, before the cost of tokenising it."""
        least_tokens = self._loaded_tokenizer().least_tokens(characters)
        if least_tokens >= self._limits().max_model_len:
            raise context_length_exceeded(param, f"at least {least_tokens}", None, self._limits().max_model_len)

    def _limits(self) -> ModelLimits:
        assert self.engine.model_limits is not None  # noqa: S101 - Ready means sized
        return self.engine.model_limits

    def _loaded_tokenizer(self) -> Tokenizer:
        assert self._tokenizer is not None  # noqa: S101 - Ready means loaded
        return self._tokenizer

    async def _off_the_loop(self, work: Callable[[], Result], characters: int | None = None) -> Result:
        """In a thread and with a time limit: one huge or hostile input never stalls the other streams.

        Unless the input has few `characters`: then the work is quicker than the way to a thread and back.
        """
        if characters is not None and characters <= limits.TOKENIZE_ON_LOOP_CHARACTERS:
            return work()
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        try:
            return await asyncio.wait_for(running, limits.TOKENIZE_TIMEOUT_SECONDS)
        except TimeoutError as error:
            raise ApiError(400, "The prompt took too long to tokenise.", code="prompt_too_complex") from error
