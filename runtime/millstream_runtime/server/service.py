"""The state that all routes share, and the steps from a request's JSON to a Generation."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from millstream_runtime.boot import BootLedger, Phase
from millstream_runtime.config import RuntimeConfig
from millstream_runtime.engine_process.messages import ModelLimits
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.logs import log
from millstream_runtime.server.engine.client import EngineClient, EngineLauncher
from millstream_runtime.server.engine.watchdog import NO_PROGRESS_SECONDS, STUCK_SECONDS
from millstream_runtime.server.http import limits
from millstream_runtime.server.http.api_errors import ApiError, engine_failed, unavailable
from millstream_runtime.server.http.api_keys import ApiKeys
from millstream_runtime.server.http.connection_limits import ConnectionLimits, connection_limits
from millstream_runtime.server.http.connection_table import ConnectionTable
from millstream_runtime.server.openai.generation import Generation, GenerationPlan
from millstream_runtime.server.openai.prompts import PromptTokenizer
from millstream_runtime.server.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    StreamedUsage,
)
from millstream_runtime.server.openai.sampling import (
    SamplingDefaults,
    require_in_vocabulary,
    sampling_params,
)
from millstream_runtime.server.operations.admission import MOST_SHARED_CAPACITY, Admission
from millstream_runtime.server.operations.answered_requests import AnsweredRequests
from millstream_runtime.server.operations.cache_info import cache_config_labels
from millstream_runtime.server.operations.load_report import LoadReport
from millstream_runtime.server.operations.metrics import ServerMetrics
from millstream_runtime.server.operations.server_gauges import ServerGauges
from millstream_runtime.server.operations.traces import RequestTraces
from millstream_runtime.tokenizing.folder.choices import TextChoices
from millstream_runtime.tokenizing.tokenizer import Tokenizer


class Service:
    """Created before anything is loaded; `start` loads the tokenizer and the engine while HTTP listens."""

    def __init__(
        self,
        config: RuntimeConfig,
        ledger: BootLedger,
        launch_engine: EngineLauncher,
        *,
        on_failure: Callable[[RuntimeFailure], None],
        restart_delays_seconds: Sequence[float],
        no_progress_seconds: float = NO_PROGRESS_SECONDS,
        stuck_seconds: float = STUCK_SECONDS,
        limits_of_connections: ConnectionLimits | None = None,
    ) -> None:
        """`limits_of_connections` None: those that fit the admission and this process.

        Raises:
            ApiKeysInvalid: the file of API keys cannot be used.
        """
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
        self.metrics = ServerMetrics(config.served_model_name, ledger, self.engine, cache_config_labels(config))
        self.answered = AnsweredRequests()
        self.engine.on_start = self.answered.begin_boot
        self.load = LoadReport(ledger, self.engine, self.metrics, self.answered)
        self.api_keys = keys = ApiKeys(Path(config.api_keys_file)) if config.api_keys_file is not None else None
        capacity = config.max_num_seqs + limits.max_waiting_requests(config.max_num_seqs)
        self.admission = Admission(capacity)
        if keys is not None:
            self.admission.num_clients = lambda: len(keys.tenants)
            self.metrics.waits.clients = lambda: keys.tenants
        most_places = capacity if keys is None else MOST_SHARED_CAPACITY * capacity
        self.connections = ConnectionTable(limits_of_connections or connection_limits(most_places))
        self.metrics.register(ServerGauges(self.metrics.labels, self.admission, self.connections))
        self.traces = RequestTraces.from_environment(config.served_model_name)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenizer")
        self._short_chat_threads = ThreadPoolExecutor(limits.SHORT_CHAT_THREADS, thread_name_prefix="short-chats")
        self.body_threads = ThreadPoolExecutor(1, thread_name_prefix="bodies")
        self._prompts: PromptTokenizer | None = None
        self.text_choices: TextChoices | None = None  # once the tokenizer is loaded
        self._defaults = SamplingDefaults()

    def start(self) -> None:
        """Start loading, on the event loop; the ledger shows the progress."""
        self.engine.start()
        self._loading = asyncio.get_running_loop().create_task(self._load_tokenizer())

    async def _load_tokenizer(self) -> None:
        folder = Path(self.config.model)

        def load() -> tuple[Tokenizer, SamplingDefaults]:
            return Tokenizer.from_folder(folder), SamplingDefaults.from_folder(folder)

        try:
            tokenizer, self._defaults = await asyncio.get_running_loop().run_in_executor(self._threads, load)
        except RuntimeFailure as failure:
            self.engine.give_up(failure)
        except Exception as error:  # a bug: log its traceback
            log.error("tokenizer_crashed", traceback="".join(traceback.format_exception(error)))
            message = f"The tokenizer in {folder} cannot be loaded ({type(error).__name__}); see the log."
            self.engine.give_up(RuntimeFailure(FailureReason.CHECKPOINT_INVALID, message))
        else:
            self.text_choices = tokenizer.choices
            _log_choices(tokenizer.choices)
            self._prompts = PromptTokenizer(tokenizer, self._threads, self._short_chat_threads, self._limits)
            self._enter_ready()

    def _enter_ready(self) -> None:
        if self.engine.is_ready and self._prompts is not None:
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

    @property
    def prompts(self) -> PromptTokenizer:
        """Available once Ready."""
        assert self._prompts is not None  # noqa: S101 - Ready means loaded
        return self._prompts

    async def chat(self, request: ChatCompletionRequest, arrived_at_seconds: float, tenant: str) -> Generation:
        """Render and tokenise a conversation.

        Raises:
            ApiError: no chat template, messages the template refuses, or a context overflow.
        """
        prompt = await self.prompts.chat_ids(request.messages, request.chat_template_kwargs)
        return self._generation(request, [prompt], (), arrived_at_seconds, tenant)

    async def completion(self, request: CompletionRequest, arrived_at_seconds: float, tenant: str) -> Generation:
        """Tokenise plain prompts, or check token ids.

        Raises:
            ApiError: an empty prompt, an id outside the vocabulary, or a context overflow.
        """
        prompts = await self.prompts.completion_ids(request.prompt)
        echoes = await self.prompts.texts(request.prompt) if request.echo else ()
        return self._generation(request, prompts, echoes, arrived_at_seconds, tenant)

    def close(self) -> None:
        if self.traces is not None:
            self.traces.close()
        for threads in (self._threads, self._short_chat_threads, self.body_threads):
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
            shows_every_token=request.streamed_usage is StreamedUsage.EVERY_CHUNK,
            priority=request.priority,
            # Holders of different keys never share a prefix; users of one key can be separated by a salt.
            cache_salt=f"{tenant}\n{request.cache_salt or ''}",
            client=tenant,
            client_ranks_above=self.api_keys is not None and self.api_keys.ranks_above(tenant),
        )
        return Generation(self.engine, self.prompts.tokenizer, self.metrics, plan, arrived_at_seconds)

    def _limits(self) -> ModelLimits:
        assert self.engine.model_limits is not None  # noqa: S101 - Ready means sized
        return self.engine.model_limits


def _log_choices(choices: TextChoices) -> None:
    """One line for what was chosen, and one for each thing in which the folder's files contradict each other."""
    log.info("model_text", **choices.log_fields())
    for note in choices.notes:
        log.warning("model_text_differs", message=note)
