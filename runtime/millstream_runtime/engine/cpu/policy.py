"""What an engine does around its steps on a CPU; see `device_policy.DevicePolicy`."""

from __future__ import annotations

import functools
import os
from functools import partial

import torch
from torch import Tensor

from millstream_kernels.cpu.bfloat16 import check as bfloat16_check
from millstream_kernels.cpu.bfloat16.product import Bfloat16Product
from millstream_runtime import config
from millstream_runtime.engine.attention.paged_attention import KVRead
from millstream_runtime.engine.cpu import compiled_code, freed_memory, pages, threads, warm_up
from millstream_runtime.engine.device_policy import ThreadCounts, WarmUpSteps
from millstream_runtime.engine.host_limits import usable_cpus
from millstream_runtime.logs import log


class CpuPolicy:
    """Threads by the size of a step."""

    is_synchronous = True
    # 20 tokens per second: faster than people read.
    default_target_itl_milliseconds = config.DEFAULT_CPU_TARGET_ITL_MILLISECONDS

    def __init__(self, num_ranks: int = 1) -> None:
        """Give torch this rank's share of the cores, unless OMP_NUM_THREADS has set it."""
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, usable_cpus() // num_ranks))
        self.compiled_code, self.compiled_problem = compiled_code.load()
        self.threads = ThreadCounts(torch.get_num_threads())  # until they are measured
        self._is_measuring = False  # then the measurement sets the threads

    @property
    def bfloat16_product(self) -> Bfloat16Product | None:
        return self._checked_bfloat16[0]

    @property
    def bfloat16_problem(self) -> str | None:
        return self._checked_bfloat16[1]

    @functools.cached_property
    def _checked_bfloat16(self) -> tuple[Bfloat16Product | None, str | None]:
        """Only for models that would use it: code that oneDNN writes for the check stays, some 25 MB."""
        checked = bfloat16_check.load()
        freed_memory.give_back_freed_memory()
        return checked

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return pages.zeros(shape, dtype)

    def after_loading(self) -> None:
        freed_memory.keep_freed_memory()

    def warm_up(self, steps: WarmUpSteps, *, is_only_rank: bool) -> None:
        if is_only_rank and self.threads.all_threads > 1:  # with several ranks each keeps its share of the cores
            self._measure_threads(steps)
        warm_up.run_decodes_of_every_number(steps)

    def _measure_threads(self, steps: WarmUpSteps) -> None:
        self._is_measuring = True
        try:
            limits = warm_up.measure_threads(steps, self.threads.all_threads)
        finally:
            self._is_measuring = False
        if limits is not None:
            self.threads = ThreadCounts(self.threads.all_threads, limits)
            log.info("threads_chosen", threads=self.threads.describe())

    def before_compute(self, num_tokens: int) -> None:
        """Give torch as many threads as a step of `num_tokens` is quickest with."""
        if self._is_measuring:
            return
        num_threads = self.threads.of(num_tokens)
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)

    def begin_span(self) -> None:
        return None

    def free_cached_memory(self) -> None:
        return  # malloc gives freed memory to whoever asks next

    def kv_read(self) -> KVRead | None:
        return partial(threads.reading, all_threads=self.threads.all_threads)
