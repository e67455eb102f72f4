"""The requests that schedules draw from, and what each gets alone, in an engine without a cache, step by step."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from torch import Tensor

from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.request import FinishReason, Request, SamplingParams, TokenLogprobs
from millstream_runtime.engine.scheduling.sequence import Sequence
from tests.soak.schedules.engines import Engines
from tests.soak.schedules.schedule import CONTEXT_TOKENS, MOST_NEW_TOKENS, REPEATING
from tests.soak.schedules.tiny_models import DAMAGED, DAMAGED_TOKEN, VOCABULARY
from tests.support.small_pool import shrink_pool

LONGEST_PROMPT_TOKENS = CONTEXT_TOKENS - MOST_NEW_TOKENS - 2
NUM_TEXTS, TEXT_TOKENS = 3, 96  # what prompts begin with
PREFIX_TOKENS = (7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 65, 80, 96)
TEMPERATURES = (0.3, 0.9, 1.3)
TAKES_UP_THE_PROMPT = 0.5  # repetition penalty, with which most tokens come from the prompt
ALONE_BLOCKS, ALONE_BLOCK_TOKENS = 24, 16


@dataclass(frozen=True, slots=True)
class Alone:
    """What a request gets that has an engine to itself.

    Attributes:
        logprobs: of each token; None where they were not asked for.
        keys_values: of each layer, `[tokens, heads, D]`, of all tokens whose are computed. By whether they turn by the
            model's angles for long sequences (longrope): a request that becomes long has both.
    """

    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs | None]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    keys_values: dict[bool, list[Tensor]]


class Catalogue:
    """The requests of one model, made as they are asked for; the same for the same seed."""

    def __init__(self, engines: Engines, model: str, seed: int, sampled_share: float = 0.0) -> None:
        """`sampled_share`: of the requests that would be greedy, which are sampled instead."""
        self._engines, self._model, self._seed, self._sampled_share = engines, model, seed, sampled_share
        self._requests: dict[int, Request] = {}
        self._alone: dict[int, Alone] = {}
        self._engine: Engine | None = None
        self._freed: dict[bool, list[Tensor]] = {}
        rng = random.Random(f"{seed}/{model}")
        self._is_damaged = model in DAMAGED
        self._texts = [self._tokens(rng, TEXT_TOKENS) for _ in range(NUM_TEXTS)]

    def request(self, index: int) -> Request:
        """Request `index`, for MOST_NEW_TOKENS tokens."""
        if index not in self._requests:
            rng = random.Random(f"{self._seed}/{self._model}/{index}")
            repeats = index in REPEATING
            prompt = (self._draw_repeating(rng) if repeats else self._draw_prompt(rng, index))[:LONGEST_PROMPT_TOKENS]
            sampling = _draw_sampling(rng)
            if repeats and rng.random() < 0.7:
                sampling = replace(sampling, repetition_penalty=TAKES_UP_THE_PROMPT)
            if not sampling.temperature and rng.random() < self._sampled_share:
                sampling = replace(sampling, temperature=rng.choice(TEMPERATURES))
            self._requests[index] = Request(str(index), prompt, _spared(sampling) if self._is_damaged else sampling)
        return self._requests[index]

    def alone(self, index: int) -> Alone:
        """What request `index` gets alone."""
        if index not in self._alone:
            if self._engine is None:
                self._engine = self._engines.make(
                    self._model,
                    max_num_seqs=1,
                    enable_prefix_caching=False,
                    enable_hybrid_kv_cache_manager=False,
                    max_model_len=CONTEXT_TOKENS,
                )
                shrink_pool(self._engine, ALONE_BLOCKS, frees_outside_window=False)
                self._keep_what_is_freed(self._engine)
            request = self.request(index)  # which may need the answer of another
            self._freed = {}
            self._alone[index] = _answer_alone(self._engine, request, self._freed)
        return self._alone[index]

    def _keep_what_is_freed(self, engine: Engine) -> None:
        """Copy keys and values just before the blocks of a sequence are freed."""
        free, layers = engine._blocks.free, engine._runner._forward._cache.layers

        def copy_and_free(sequence: Sequence) -> None:
            table, count = sequence.block_table, sequence.num_computed_tokens
            self._freed[sequence.kv_variant != 0] = [layer[table].flatten(0, 1)[:count].clone() for layer in layers]
            free(sequence)

        engine._blocks.free = copy_and_free  # type: ignore[method-assign]

    def _draw_prompt(self, rng: random.Random, index: int) -> list[int]:
        """Mostly the beginning of a text that others begin with, or the next turn of another request."""
        kind = rng.random()
        if kind < 0.55:
            return [
                *rng.choice(self._texts)[: rng.choice(PREFIX_TOKENS)],
                *self._tokens(rng, rng.choice((0, 1, 5, 20))),
            ]
        if kind < 0.75 or not index:
            return self._tokens(rng, rng.randint(1, 60))
        before = rng.randrange(index)
        answer = self.alone(before).token_ids
        said = answer[: rng.randint(1, len(answer))]
        return [*self.request(before).prompt_token_ids, *said, *self._tokens(rng, rng.randint(1, 12))]

    def _draw_repeating(self, rng: random.Random) -> list[int]:
        """A passage again and again, cut off anywhere."""
        passage = self._tokens(rng, rng.randint(4, 45))
        return (passage * LONGEST_PROMPT_TOKENS)[: rng.randint(len(passage) + 3, LONGEST_PROMPT_TOKENS)]

    def _tokens(self, rng: random.Random, count: int) -> list[int]:
        """Any tokens but the damaged one."""
        return [rng.randrange(DAMAGED_TOKEN if self._is_damaged else VOCABULARY) for _ in range(count)]


def _spared(sampling: SamplingParams) -> SamplingParams:
    """The same, but for the damaged token, which never comes."""
    others = [pair for pair in sampling.logit_bias if pair[0] != DAMAGED_TOKEN]
    return replace(sampling, logit_bias=(*others, (DAMAGED_TOKEN, -100.0)))


def _draw_sampling(rng: random.Random) -> SamplingParams:
    """Nearly half are plain greedy: the others ask for a few things at once."""
    asked: dict[str, object] = {"temperature": 0.0, "ignore_eos": True, "seed": rng.getrandbits(40)}
    if rng.random() < 0.45:
        return SamplingParams(MOST_NEW_TOKENS, **asked)  # type: ignore[arg-type]
    options: dict[str, object] = {
        "temperature": rng.choice(TEMPERATURES),
        "top_k": rng.choice((1, 3, 40)),
        "top_p": rng.choice((0.3, 0.8, 0.95)),
        "min_p": rng.choice((0.01, 0.2)),
        "repetition_penalty": rng.choice((0.7, 1.3)),
        "frequency_penalty": rng.choice((-0.5, 0.4)),
        "presence_penalty": rng.choice((-1.0, 0.6)),
        "logit_bias": tuple((rng.randrange(VOCABULARY), rng.choice((-100.0, -2.0, 3.0))) for _ in range(3)),
        "min_tokens": rng.randint(1, 8),
        "stop_token_ids": frozenset(rng.sample(range(VOCABULARY), 12)),
        "ignore_eos": False,
        "logprobs": rng.choice((0, 3)),
        "prompt_logprobs": 2,
    }
    return SamplingParams(
        MOST_NEW_TOKENS,
        **(asked | {name: value for name, value in options.items() if rng.random() < 0.3}),  # type: ignore[arg-type]
    )


def _answer_alone(engine: Engine, request: Request, freed: dict[bool, list[Tensor]]) -> Alone:
    engine.add_request(request)
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    engine.check_integrity()
    reason = outputs[-1].finish_reason
    token_ids = [output.token_id for output in outputs if output.token_id is not None]
    if reason is None or len(token_ids) < len(outputs):
        raise ValueError(f"request {request.request_id} has no answer alone: {outputs[-1]}")
    prompt_logprobs = outputs[0].prefill.prompt_logprobs if outputs[0].prefill is not None else None
    return Alone(token_ids, reason, [output.logprobs for output in outputs], prompt_logprobs, freed)
