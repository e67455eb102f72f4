"""How `cpu_mechanisms` switches a mechanism of the CPU engine off: by patches here, never by a setting for users."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from millstream_runtime.engine.attention import compiled_decodes, compiled_prompts
from millstream_runtime.engine.cpu import freed_memory, pages, warm_up
from millstream_runtime.engine.cpu.policy import CpuPolicy
from millstream_runtime.engine.execution import rank_kernels
from millstream_runtime.engine.execution.step_input import StepInput
from millstream_runtime.models.cpu import bfloat16_linear, linear, two_layouts
from millstream_runtime.models.cpu.linear import CpuLayout
from millstream_runtime.server.engine.huge_pages import TUNABLE, VARIABLE

Switch = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Mechanism:
    """A mechanism, and where it matters.

    Attributes:
        off: holds while the engine without the mechanism is made and whenever it computes.
        given: holds for both engines: where the mechanism is used at all.
        config: fields of RuntimeConfig for both engines.
        environment_off: variables of a process without the mechanism.
        per_process: each engine has a process of its own, because the setting belongs to the process.
        once: workloads whose first run in a process is what counts.
    """

    name: str
    workloads: tuple[str, ...]
    off: Switch = nullcontext
    given: Switch = nullcontext
    config: Mapping[str, Any] = field(default_factory=dict)
    environment_off: Mapping[str, str] = field(default_factory=dict)
    per_process: bool = False
    once: tuple[str, ...] = ()


@contextmanager
def together(*switches: Switch) -> Iterator[None]:
    """All of them."""
    with ExitStack() as stack:
        for switch in switches:
            stack.enter_context(switch())
        yield


def no_half() -> AbstractContextManager[Any]:
    """No float16 copies, as for a float32 checkpoint."""
    return patch.object(CpuLayout, "_half_copy", lambda self, weight: None)


def no_second_layout() -> AbstractContextManager[Any]:
    """Weights as `[in, out]` only."""
    return patch.object(two_layouts, "can_pack", lambda dtype, device: False)


def no_copies() -> AbstractContextManager[Any]:
    """As where memory has no room for copies."""
    return together(no_half, no_second_layout)


def no_split() -> AbstractContextManager[Any]:
    """One product for a weight, however few the rows."""
    return patch.object(linear, "num_parts", lambda x, weight: 1)


def no_split_of_one_row() -> AbstractContextManager[Any]:
    """The same for weights with a second layout."""
    return patch.object(two_layouts, "LEAST_PART_ELEMENTS", 1 << 62)


def rows_of_onednn() -> AbstractContextManager[Any]:
    """One row by oneDNN's bfloat16 product, as more are."""
    return patch.object(bfloat16_linear, "row_weight", lambda *given: None)


def no_thread_choice() -> AbstractContextManager[Any]:
    """All threads for every step."""
    return patch.object(CpuPolicy, "_measure_threads", lambda self, steps: None)


def no_attention_threads() -> AbstractContextManager[Any]:
    """Attention computes with the threads of its step."""
    return patch.object(CpuPolicy, "kv_read", lambda self: None)


def huge_pages() -> AbstractContextManager[Any]:
    """A KV pool in huge pages, as where the kernel's rule for them is `always`."""

    def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if not math.prod(shape):
            return torch.zeros(shape, dtype=dtype)
        memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    return patch.object(pages, "zeros", zeros)


def freed_memory_given_back() -> AbstractContextManager[Any]:
    """glibc's defaults."""
    return patch.object(freed_memory, "keep_freed_memory", lambda: False)


def exact_rows() -> AbstractContextManager[Any]:
    """oneDNN writes code for each number of rows."""
    return patch.object(two_layouts, "padded_rows", lambda num_rows: num_rows)


def no_decodes_in_warm_up() -> AbstractContextManager[Any]:
    """Decodes of 16, 15, ..., 1 requests first run for users."""
    return patch.object(warm_up, "run_decodes_of_every_number", lambda steps: None)


def all_rows_of_the_last_layer() -> AbstractContextManager[Any]:
    """The last layer computes rows that nothing reads, too."""
    return patch.object(StepInput, "reads_all_rows", True)


def no_compiled_decodes() -> AbstractContextManager[Any]:
    """Attention of decodes by torch, as on a CPU without AVX2."""
    return patch.object(compiled_decodes, "unsupported", lambda dtype: "it is off")


def no_compiled_prompts() -> AbstractContextManager[Any]:
    """Attention of prompts by torch, as on a CPU without AVX2."""
    return patch.object(compiled_prompts, "unsupported", lambda dtype: "it is off")


def torch_layers() -> AbstractContextManager[Any]:
    """Norms, gates and rotations by torch, as on a CPU without AVX2."""
    return patch.object(rank_kernels, "compiled_layers", lambda choices, code: None)


def unbounded_prompts() -> AbstractContextManager[Any]:
    """`max_num_batched_tokens` alone bounds the prompts of a step, as on a GPU without a target."""
    return patch.object(CpuPolicy, "default_target_itl_milliseconds", None)


MECHANISMS = (
    Mechanism("compiled decodes", ("decode-1", "decode-1-long", "decode-16"), no_compiled_decodes),
    Mechanism("compiled decodes, 64 at once", ("decode-64-mixed",), no_compiled_decodes, config={"max_num_seqs": 64}),
    Mechanism("compiled prompts", ("prefill-512", "prefill-any", "mixed"), no_compiled_prompts),
    Mechanism("compiled layers", ("decode-1", "decode-16", "prefill-512", "mixed"), torch_layers),
    Mechanism("compiled layers, 64 at once", ("decode-64-mixed",), torch_layers, config={"max_num_seqs": 64}),
    Mechanism("float16 copies", ("decode-1", "decode-16"), no_half),
    Mechanism("second layout", ("decode-16", "prefill-512", "mixed"), no_second_layout),
    Mechanism("second layout, float32 checkpoint", ("decode-1", "decode-16"), no_second_layout, given=no_half),
    Mechanism("bfloat16 product of one row", ("decode-1",), rows_of_onednn),
    Mechanism("split product of one row", ("decode-1",), no_split_of_one_row, given=no_half),
    Mechanism("split product, no room for copies", ("decode-1",), no_split, given=no_copies),
    Mechanism("padded rows for oneDNN", ("prefill-any",), exact_rows),
    Mechanism("threads by size of step", ("decode-1", "decode-16"), no_thread_choice),
    Mechanism("threads by bytes of attention", ("decode-1-long", "decode-16"), no_attention_threads),
    Mechanism("prompts bounded by time", ("mixed", "burst"), unbounded_prompts),
    Mechanism("rows of the last layer", ("prefill-512", "mixed"), all_rows_of_the_last_layer),
    Mechanism(
        "huge pages for weights",
        ("decode-1", "decode-16"),
        per_process=True,
        environment_off={VARIABLE: f"{TUNABLE}=0"},
    ),
    Mechanism(
        "small pages of the KV pool",
        ("drain", "decode-16"),
        huge_pages,
        per_process=True,
        once=("drain",),
    ),
    Mechanism("freed memory kept", ("prefill-512",), freed_memory_given_back, per_process=True),
    Mechanism(
        "threads spin briefly",
        ("decode-1", "decode-16"),
        per_process=True,
        environment_off={"GOMP_SPINCOUNT": "300000"},
    ),
    Mechanism(
        "decodes of every number in the warm-up", ("drain",), no_decodes_in_warm_up, per_process=True, once=("drain",)
    ),
)
