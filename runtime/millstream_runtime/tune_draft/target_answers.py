"""The target's own answers, with its distributions: from the runtime's engine, so as they are served.

Each prompt is answered once greedily and once drawn at the requests' temperature; what its document says is read as
well. Every request has a seed of its own and the engine's clock stands still, so that the same prompts give the same
steps, and the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from millstream_runtime.config import Device, RuntimeConfig
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.request import Request, SamplingParams, TokenOutput
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.job_memory.draft_tuning import POOL_REQUESTS, TOP
from millstream_runtime.models.registry import load_model_config
from millstream_runtime.tune_draft.documents import Prompt
from millstream_runtime.tune_draft.target_sequence import Kind, TargetSequence

MAX_REQUESTS = 32  # in a step; POOL_REQUESTS leaves room for windows and block sizes
LEAST_POOL_BYTES = 1 << 20


class TargetModel:
    """The target in an engine. `sequence_tokens`: the longest prompt with its answer."""

    def __init__(self, folder: Path, device: str, sequence_tokens: int, answer_tokens: int, temperature: float) -> None:
        """Raises RuntimeFailure: the model cannot be loaded."""
        shape = load_model_config(folder)
        length = min(sequence_tokens + 1, shape.max_model_len)
        pool_bytes = POOL_REQUESTS * length * shape.kv_bytes_per_token(4)
        config = RuntimeConfig(
            model=str(folder),
            served_model_name="target",
            device=Device(device),
            max_model_len=length,
            max_num_seqs=MAX_REQUESTS,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=max(LEAST_POOL_BYTES, pool_bytes),
        )
        self._engine = Engine(config, lambda phase, message: None)
        self._engine.step_clock = lambda: 0.0
        self._answer_tokens, self._temperature = answer_tokens, temperature
        self._top = min(TOP, shape.vocab_size)

    def close(self) -> None:
        self._engine.close()

    def answers(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[TargetSequence]:
        """Return the sequences of the prompts, in their order: see `kinds_of`.

        Raises:
            RuntimeFailure: CheckpointInvalid, a logit is not finite.
        """
        asked = [(index, kind) for index, one in enumerate(prompts) for kind in kinds_of(one, self._temperature)]
        outputs: dict[str, list[TokenOutput]] = {}
        for number, (index, kind) in enumerate(asked):
            outputs[str(number)] = []
            self._engine.add_request(self._request(str(number), prompts[index], kind, seeds[index]))
        while self._engine.has_work():
            for output in self._engine.step():
                outputs[output.request_id].append(output)
        return [
            self._sequence(prompts[index], kind, outputs[str(number)]) for number, (index, kind) in enumerate(asked)
        ]

    def _request(self, name: str, prompt: Prompt, kind: Kind, seed: int) -> Request:
        if kind is Kind.TEXT:
            ids = prompt.prompt_ids + prompt.text_ids
            return Request(name, ids, SamplingParams(1, temperature=0.0, prompt_logprobs=self._top))
        temperature = 0.0 if kind is Kind.GREEDY else self._temperature
        sampling = SamplingParams(self._answer_tokens, temperature=temperature, seed=seed, logprobs=self._top)
        return Request(name, prompt.prompt_ids, sampling)

    def _sequence(self, prompt: Prompt, kind: Kind, outputs: Sequence[TokenOutput]) -> TargetSequence:
        if any(one.token_id is None for one in outputs):
            raise RuntimeFailure(
                FailureReason.CHECKPOINT_INVALID, "The target's logits are not finite numbers for a prompt of the data."
            )
        if kind is Kind.TEXT:
            ids, first, prefill = prompt.prompt_ids + prompt.text_ids, prompt.text_first, outputs[0].prefill
            found = list((prefill.prompt_logprobs if prefill is not None else None) or ())[first:]
        else:
            ids = prompt.prompt_ids + [one.token_id for one in outputs if one.token_id is not None]
            first = len(prompt.prompt_ids)
            found = [one.logprobs for one in outputs]
        tops = [one.top for one in found if one is not None]
        return TargetSequence(
            prompt.slice,
            prompt.is_general,
            kind,
            torch.tensor(ids, dtype=torch.int32),
            first,
            torch.tensor([[token for token, _ in one] for one in tops], dtype=torch.int32),
            torch.tensor([[value for _, value in one] for one in tops], dtype=torch.float16),
        )


def kinds_of(prompt: Prompt, temperature: float) -> list[Kind]:
    """Return what a prompt gives: answers, and its document's own text where that has tokens."""
    kinds = [Kind.GREEDY] + ([Kind.SAMPLED] if temperature > 0 else [])
    return kinds + ([Kind.TEXT] if prompt.text_ids else [])
