"""The sides of a comparison: ours, and two ways of `transformers`. Each answers a `Case` greedily, past every
end-of-sequence token, so all produce the same number of useful tokens.

What is timed begins with prompts as token ids in memory and ends with the last token id.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.utils.logging import disable_progress_bar

from benchmarks.cases import MAX_NEW_TOKENS, MAX_PROMPT_TOKENS, NUM_CONCURRENT, Case
from millstream_runtime.config import Device, DType, RuntimeConfig
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.request import Request, SamplingParams

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
clock: Callable[[], float] = time.perf_counter
disable_progress_bar()  # of reading weights: the table is what a person waits for
PAGE_TOKENS = 256  # transformers' own default


class Contender(Protocol):
    """One side."""

    name: str

    def run(self, case: Case) -> tuple[float, list[list[int]]]:
        """Seconds from the first request to the last token, and the answers."""
        ...

    def close(self) -> None: ...


class Runtime:
    """Our engine: the prompts are as many requests."""

    def __init__(self, folder: Path, dtype: str = "float32") -> None:
        self.name = f"millstream {dtype}"
        config = RuntimeConfig(
            model=str(folder),
            served_model_name="bench",
            device=Device.CPU,
            dtype=DType(dtype),
            max_num_seqs=NUM_CONCURRENT,
        )
        self.engine = Engine(config, lambda phase, message: print(f"  {phase}: {message}"))
        self.engine.warm_up()
        self._runs = 0

    def run(self, case: Case) -> tuple[float, list[list[int]]]:
        self._runs += 1
        answers: dict[str, list[int]] = {f"{self._runs}/{index}": [] for index in range(len(case.prompts))}
        start = clock()
        for request_id, prompt, count in zip(answers, case.prompts, case.new_tokens, strict=True):
            self.engine.add_request(
                Request(request_id, prompt, SamplingParams(count, temperature=0.0, ignore_eos=True))
            )
        while self.engine.has_work():
            for output in self.engine.step():
                if output.token_id is not None:
                    answers[output.request_id].append(output.token_id)
        return clock() - start, list(answers.values())

    def close(self) -> None:
        """Nothing may have leaked after all those runs."""
        self.engine.check_integrity()


class TransformersGenerate:
    """`generate`: all prompts in one left-padded static batch, which runs until its longest answer is done."""

    def __init__(self, folder: Path, dtype: str = "float32") -> None:
        self.name = f"transformers generate {dtype}"
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=TORCH_DTYPES[dtype]).eval()
        self._model.generation_config.eos_token_id = None

    def run(self, case: Case) -> tuple[float, list[list[int]]]:
        longest = max(map(len, case.prompts))
        start = clock()
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in case.prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in case.prompts])
        output = self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max(case.new_tokens),
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        seconds = clock() - start
        return seconds, [
            row[longest : longest + count].tolist() for row, count in zip(output, case.new_tokens, strict=True)
        ]

    def close(self) -> None:
        pass


class TransformersContinuous:
    """transformers' own continuous batching, each prompt with its own limit, so the batch shrinks as answers end.

    `attention` is one of the two that work without a GPU. The manager is kept between runs (its cache is made once),
    and its thread is stopped between them, so that it takes no core from the others. Prefix sharing is off: no prompt
    comes twice.
    """

    def __init__(self, folder: Path, dtype: str = "float32", attention: str = "sdpa") -> None:
        self.name = f"transformers continuous {dtype} {attention.removeprefix('paged|')}"
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)  # asks for psutil and flash attention
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=TORCH_DTYPES[dtype], attn_implementation=attention
        ).eval()
        blocks = NUM_CONCURRENT * (-(-(MAX_PROMPT_TOKENS + MAX_NEW_TOKENS) // PAGE_TOKENS) + 1)
        self._batching = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=blocks,
            max_batch_tokens=NUM_CONCURRENT * MAX_PROMPT_TOKENS,
            max_requests_per_batch=NUM_CONCURRENT,
            allow_block_sharing=False,
            auto_switch_to_flash=False,
        )
        self._generation = GenerationConfig(
            do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=MAX_NEW_TOKENS
        )

    def run(self, case: Case) -> tuple[float, list[list[int]]]:
        manager_context = self._model.continuous_batching_context_manager(
            generation_config=self._generation,
            continuous_batching_config=self._batching,
            persistent_manager=True,
        )
        with manager_context as manager:
            start = clock()
            wanted = [
                manager.add_request(prompt, max_new_tokens=count)
                for prompt, count in zip(case.prompts, case.new_tokens, strict=True)
            ]
            done: dict[str, Any] = {}
            while len(done) < len(wanted):
                output = manager.get_result(timeout=1)
                if output is not None and output.is_finished():
                    done[output.request_id] = output
                elif output is None and not manager.is_running():
                    raise RuntimeError("the generation thread ended")
            seconds = clock() - start
        errors = [done[name].error for name in wanted if done[name].error is not None]
        if errors:
            raise RuntimeError(str(errors[0]))
        return seconds, [list(done[name].generated_tokens) for name in wanted]

    def close(self) -> None:
        self._model.destroy_cached_continuous_batching_manager()
