"""What an engine does around its steps that depends on the kind of device: host threads, memory, work ahead of time.

    request -> schedule -> step -> attention -> sample     the same code for every device
                            |
                       DevicePolicy                        AcceleratorPolicy here; a CPU's in `engine.cpu`

The policy of a device is made in `engine.devices`, and nothing else knows which one it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from millstream_runtime.engine.attention.paged_attention import KVRead
from millstream_runtime.engine.device_events import CudaSpan, StepSpan
from millstream_runtime.engine.host_limits import usable_cpus
from millstream_runtime.engine.request import SamplingParams

if TYPE_CHECKING:
    from millstream_kernels.cpu.bfloat16.product import Bfloat16Product
    from millstream_kernels.cpu.loaded_code import LoadedCode


@dataclass(frozen=True, slots=True)
class ThreadCounts:
    """Host threads that compute a step. `limits`: (most tokens, threads), ascending; beyond them `all_threads`."""

    all_threads: int
    limits: tuple[tuple[int, int], ...] = ()

    def of(self, num_tokens: int) -> int:
        """Threads for a step of `num_tokens`."""
        return next((threads for most, threads in self.limits if num_tokens <= most), self.all_threads)

    def describe(self) -> str:
        """`1 up to 4 tokens a step, 2 beyond`."""
        parts = [f"{threads} up to {most} tokens a step" for most, threads in self.limits]
        return ", ".join([*parts, f"{self.all_threads} beyond" if parts else str(self.all_threads)])


class WarmUpSteps(Protocol):
    """What `DevicePolicy.warm_up` runs steps with."""

    def step(self) -> object: ...
    def has_work(self) -> bool: ...

    def max_requests(self, num_tokens: int) -> int:
        """How many requests of that length the engine can run at once; 0 if it is longer than the engine allows."""

    @property
    def longest_step_tokens(self) -> int:
        """The longest prompt that one step takes whole."""

    def answer(self, prompt_tokens: int, samplings: Sequence[SamplingParams]) -> None:
        """Run a request for each sampling, all at once, to the end of all. No prompt is in the prefix cache."""

    def decodes(self, max_tokens: list[int]) -> AbstractContextManager[None]:
        """Requests that decode `max_tokens[i]` tokens each behind a prompt of one; cancelled at the end."""


class DevicePolicy(Protocol):
    """How an engine uses one kind of device. All methods are called by the engine's thread."""

    @property
    def threads(self) -> ThreadCounts:
        """Host threads of a step, by its size."""

    @property
    def is_synchronous(self) -> bool:
        """Whether a call of torch returns only when its result is computed."""

    @property
    def default_target_itl_milliseconds(self) -> int | None:
        """What bounds the time of a step with prompts unless the configuration does; None: no bound on time."""

    @property
    def compiled_code(self) -> LoadedCode | None:
        """The kernels that were compiled for a CPU: decodes, norms, gates and rotations; None: torch computes these."""

    @property
    def compiled_problem(self) -> str | None:
        """Why there is no `compiled_code`."""

    @property
    def bfloat16_product(self) -> Bfloat16Product | None:
        """What multiplies bfloat16 numbers on a CPU; None: nothing does."""

    @property
    def bfloat16_problem(self) -> str | None:
        """Why there is no `bfloat16_product`."""

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for the KV pool."""

    def after_loading(self) -> None:
        """Weights and KV pool are allocated; steps follow."""

    def warm_up(self, steps: WarmUpSteps, *, is_only_rank: bool) -> None:
        """Run the steps that prepare this device, after those that every device runs."""

    def before_compute(self, num_tokens: int) -> None:
        """Something of `num_tokens` rows is computed next."""

    def begin_span(self) -> StepSpan | None:
        """Begin to time the step that is launched next; None: the host's clock around launch and read is right."""

    def free_cached_memory(self) -> None:
        """A step was short of memory: give back what the allocator keeps for later."""

    def kv_read(self) -> KVRead | None:
        """What the attention of the next step puts around its calls; see `KVRead`."""


class AcceleratorPolicy:
    """A GPU: it needs nothing around its steps.

    A step with a prompt in it takes as long as several decode steps, however short the prompt's chunk is, because its
    launches are not in a graph. A bound on time that follows from the cost of a token would let in a few tokens per
    step, so there is none.
    """

    is_synchronous = False
    compiled_code = None
    compiled_problem = "it is compiled for a CPU"
    bfloat16_product = None
    bfloat16_problem = "it is a CPU's"
    default_target_itl_milliseconds = None

    def __init__(
        self, device: torch.device, num_ranks: int = 1, warm_up: Callable[[WarmUpSteps], None] = lambda steps: None
    ) -> None:
        """`num_ranks` processes share the container's CPUs: torch would start a thread per core of the node.
        `warm_up`: runs the steps that this kind of device needs beside those of every device."""
        self._device, self._warm_up = device, warm_up
        torch.set_num_threads(max(1, usable_cpus() // num_ranks))
        self.threads = ThreadCounts(torch.get_num_threads())

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def after_loading(self) -> None:
        return

    def warm_up(self, steps: WarmUpSteps, *, is_only_rank: bool) -> None:
        self._warm_up(steps)

    def before_compute(self, num_tokens: int) -> None:
        return

    def begin_span(self) -> StepSpan | None:
        return CudaSpan() if self._device.type == "cuda" else None

    def free_cached_memory(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def kv_read(self) -> KVRead | None:
        return None
