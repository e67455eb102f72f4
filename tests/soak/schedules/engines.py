"""Engines of schedules, many per second: weights are read once per process, all else is made anew."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch

from millstream_runtime.config import Device, GovernorMode, RuntimeConfig
from millstream_runtime.distributed.leader import Leader
from millstream_runtime.engine import engine as engine_module
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.execution import draft_shard, shard
from millstream_runtime.engine.execution.execution_mode import Execution
from millstream_runtime.engine.execution.graphs.recorders import Recorder
from millstream_runtime.engine.execution.shard_config import ShardConfig
from millstream_runtime.engine.request import Request
from millstream_runtime.engine.sampling.logits_processors import LogitsProcessor
from millstream_runtime.engine.scheduling.sequence import Sequence
from millstream_runtime.engine.speculation import catching_up
from millstream_runtime.engine.speculation.drafter import Drafter
from millstream_runtime.models.layers.compiled_layers import CompiledLayers
from millstream_runtime.models.layers.decoder import Decoder
from millstream_runtime.models.linear.tensor_parallel import SINGLE_PROCESS, Ranks
from millstream_runtime.models.loading.layer_kernels import LayerKernels
from tests.soak.schedules.drafts import Answers, draft_config, drafter_without_weights, make_unreliable
from tests.soak.schedules.schedule import Schedule
from tests.soak.schedules.tiny_models import DAMAGED, DAMAGED_TOKEN, MODELS, write_model
from tests.support import varlen_reference
from tests.support.crowded import crowd
from tests.support.drafters import RandomLengths
from tests.support.eager_recorder import EagerRecorder
from tests.support.embedding import embedding_weight
from tests.support.small_pool import small_pools
from tests.support.tape_recorder import TapeRecorder

POOL_BYTES = 1 << 20
ProcessorsOf = Callable[[Request], tuple[LogitsProcessor, ...]]


class CountedSequence(Sequence):
    """A request inside an engine, which can be seen to be there still."""

    alive: ClassVar[weakref.WeakSet[Sequence]] = weakref.WeakSet()

    def __post_init__(self) -> None:
        super().__post_init__()
        CountedSequence.alive.add(self)


class FakeClock:
    """Steps take any time: the pace learns from it, and a schedule is the same every time it runs."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._now_seconds = 0.0

    def __call__(self) -> float:
        self._now_seconds += self._rng.choice((0.0, 0.001, 0.004, 0.02, 0.06))
        return self._now_seconds


class _Key(NamedTuple):
    """What decoders that engines share have in common."""

    folder: str
    max_model_len: int
    kernels: str


def _part_kernels(kernels: LayerKernels | None) -> str:
    if kernels is None:
        return "torch's layers"
    return "compiled layers" + (", rotation too" if kernels.rotates else "")


class Engines:
    """Makes engines of the models below a folder."""

    def __init__(self, root: Path, processors_of: ProcessorsOf | None = None) -> None:
        """`processors_of`: of the requests of all engines; None: they have none."""
        self.root, self._processors_of = root, processors_of
        self._decoders: dict[_Key, Decoder] = {}
        self._pair: Leader | None = None

    def close(self) -> None:
        """End the second rank, if there is one."""
        if self._pair is not None:
            self._pair.close()

    def make(
        self,
        model: str,
        *,
        execution: Execution | None = None,
        drafter: Drafter | None = None,
        ranks: int = 1,
        **config: Any,
    ) -> Engine:
        """Make an engine on a pool of POOL_BYTES, unless `small_pools` holds."""
        folder, _ = write_model(model, self.root)
        settings = {"kv_cache_memory_bytes": POOL_BYTES, "tensor_parallel_size": ranks} | config
        runtime_config = RuntimeConfig(model=str(folder), served_model_name="tiny", device=Device.CPU, **settings)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shard, "load", self._load)
            patch.setattr(draft_shard, "load_draft", self._load_draft)
            engine = Engine(
                runtime_config,
                lambda phase, message: None,
                rank_group=self._two_ranks() if ranks > 1 else None,
                execution=execution,
                drafter=drafter,
            )
        if model in DAMAGED:
            with torch.inference_mode():
                embedding_weight(engine._runner._forward.model)[DAMAGED_TOKEN] = float("nan")
        if self._processors_of is not None:
            engine.processors_for = self._processors_of
        return engine

    @contextmanager
    def of_schedule(self, schedule: Schedule, longest_tokens: int, answers: Answers) -> Iterator[Engine]:
        """The engine of a schedule, whose longest request has `longest_tokens`. `answers`: by prompt, for drafts."""
        settings = schedule.settings
        with pytest.MonkeyPatch.context() as patch, small_pools(longest_tokens, settings.spare_blocks):
            patch.setattr(engine_module, "Sequence", CountedSequence)
            if settings.reads_in_place:
                varlen_reference.use_reference(patch)
            patch.setattr(catching_up, "CHUNK_SECONDS", 1e9)  # so that what is read does not depend on the time
            engine = self.make(
                settings.model,
                execution=_execution(settings.execution, has_experts=(MODELS | DAMAGED)[settings.model].has_experts),
                drafter=drafter_without_weights(settings, answers, schedule.seed),
                ranks=2 if settings.execution == "on two ranks" else 1,
                **draft_config(settings, write_model(settings.model, self.root)[0]),
                block_size_tokens=settings.block_size_tokens,
                max_num_seqs=settings.max_num_seqs,
                max_num_batched_tokens=settings.max_num_batched_tokens,
                max_model_len=settings.max_model_len,
                enable_prefix_caching=settings.enable_prefix_caching,
                enable_hybrid_kv_cache_manager=settings.enable_hybrid_kv_cache_manager,
            )
            make_unreliable(engine, settings, answers, schedule.seed)
            if settings.governor_flips or settings.governor_decides:
                engine.set_speculation_governor(GovernorMode.ENFORCE)
            if settings.governor_flips and engine._drafting is not None:
                engine._drafting.lengths.governor = RandomLengths(schedule.seed)
            engine.step_clock = FakeClock(schedule.seed)
            if settings.crowded_tokens is not None:
                crowd(engine, settings.crowded_tokens)
            elif not settings.is_paced:
                engine._pace = None
            yield engine

    def _load(
        self,
        config: RuntimeConfig,
        shard_config: ShardConfig,
        ranks: Ranks = SINGLE_PROCESS,
        on_read: Any = None,
        kernels: LayerKernels | None = None,
    ) -> Decoder:
        """A decoder has no state of a request, so engines may share it."""
        if ranks.size > 1 or not (kernels is None or isinstance(kernels, CompiledLayers)):
            return _load_shard(config, shard_config, ranks, on_read, kernels)
        key = _Key(config.model, shard_config.model_config.max_model_len, _part_kernels(kernels))
        if key not in self._decoders:
            self._decoders[key] = _load_shard(config, shard_config, ranks, on_read, kernels)
        return self._decoders[key]

    def _load_draft(self, config: RuntimeConfig, target: ShardConfig, draft: draft_shard.DraftShard) -> Decoder:
        kernels = draft_shard.draft_kernels(config, target, draft)
        key = _Key(str(draft.folder), draft.model_config.max_model_len, _part_kernels(kernels))
        if key not in self._decoders:
            self._decoders[key] = _load_draft(config, target, draft)
        return self._decoders[key]

    def _two_ranks(self) -> Leader:
        """Started once: they load one model after another."""
        if self._pair is None:
            self._pair = Leader(2, torch.device("cpu"))
        return self._pair


_load_shard, _load_draft = shard.load, draft_shard.load_draft


def _execution(name: str, *, has_experts: bool) -> Execution | None:
    if name == "on two ranks":
        return None
    recorder: Recorder | None = None
    if name.startswith("replayed"):
        recorder = TapeRecorder() if "tape" in name and not has_experts else EagerRecorder()
    return Execution(recorder, overlapped=name.endswith("overlapped"))
