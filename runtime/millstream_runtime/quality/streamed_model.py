"""A model of which memory holds one layer at a time: hidden states of several documents go through layer after layer.

    embedding ─► layer 0 over all documents ─► layer 1 ─► ... ─► hidden states of judged tokens ─► norm and output head

The layers are those of the engine, in its arithmetic, over a KV pool of one layer and one document, so the figures are
those of what is served. A layer is read once for all documents that are computed together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from millstream_runtime.config import DType, KVCacheDType, RuntimeConfig
from millstream_runtime.engine.device_policy import DevicePolicy
from millstream_runtime.engine.execution.pass_input import PassInput
from millstream_runtime.engine.execution.shard_config import resolve_shard_config
from millstream_runtime.engine.execution.step_input import ChunkInput
from millstream_runtime.engine.kv.kv_cache import KVCache
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.job_memory.judging import CHUNK_TOKENS
from millstream_runtime.kv_layout import KVLayout
from millstream_runtime.models.layers.decoder import Decoder
from millstream_runtime.models.loading.kv_scales import read_kv_scales
from millstream_runtime.models.model_parts import ModelParts, PartBytes, part_bytes
from millstream_runtime.quality.documents import TokenizedDocument
from millstream_runtime.quality.scored_model import Slab, slab_rows

OnShare = Callable[[float], None]  # of the work, 0 to 1


@dataclass(frozen=True, slots=True)
class OutputHead:
    """The final norm and the output head of a model."""

    model: Decoder
    device: torch.device
    policy: DevicePolicy

    @torch.inference_mode()
    def slabs(self, hidden: Tensor, first: int) -> Iterator[Slab]:
        """The logits of hidden states `[rows, hidden]`, of which row 0 predicts the token at position `first`."""
        most = slab_rows(self.model.config.vocab_size)
        for start in range(0, len(hidden), most):
            rows = hidden[start : start + most].to(self.device)
            self.policy.before_compute(len(rows))
            yield Slab(first + start, self.model.logits(rows).float())


@dataclass(frozen=True, slots=True)
class ComputedDocument:
    """A document whose hidden states are known; see `token_scores.score`."""

    head: OutputHead
    hidden: Tensor  # [judged tokens, hidden]

    def logits(self, token_ids: Sequence[int], first: int) -> Iterator[Slab]:
        """Those that predict `token_ids[first:]`; `first` is that of the document."""
        return self.head.slabs(self.hidden, first)


class StreamedModel:
    """One model on one device. `config.max_model_len` bounds the documents.

    Attributes: `bytes`, what its parts take.
    """

    def __init__(self, config: RuntimeConfig) -> None:
        """Read what can be known without a weight.

        Raises:
            RuntimeFailure: CheckpointInvalid, UnsupportedByRuntime or InvalidConfig.
        """
        shard_config = resolve_shard_config(config)
        self._config, self._model_config = config, shard_config.model_config
        self.device, self.dtype = shard_config.device, shard_config.dtype
        self._policy = shard_config.policy
        self.bytes: PartBytes = part_bytes(self._model_config, self.dtype)
        self.hidden_size, self.intermediate_size = self._model_config.hidden_size, self._model_config.intermediate_size
        is_fp8 = config.kv_cache_dtype is KVCacheDType.FP8
        folder, num_layers = Path(config.model), self._model_config.num_layers
        self._fp8_scales = read_kv_scales(folder, num_layers) if is_fp8 else []
        is_exact = config.dtype is DType.FLOAT32
        self._parts = ModelParts(
            self._model_config, folder, self.dtype, self.device, may_round_activations=not is_exact
        )
        self._parts.check()

    @torch.inference_mode()
    def hidden_states(
        self, documents: Sequence[TokenizedDocument], copy_budget_bytes: int, on_share: OnShare
    ) -> list[Tensor]:
        """Return those behind the last layer that predict the judged tokens, `[judged tokens, hidden]` of each
        document, on the host.

        Args:
            copy_budget_bytes: what copies of the weights of one layer may take on a CPU.

        Raises:
            RuntimeFailure: CheckpointInvalid, or OutOfMemory on a GPU.
        """
        num_layers, num_tokens = self._model_config.num_layers, sum(len(one.token_ids) for one in documents)
        try:
            hidden = self._embedded(documents)
            cache = self._cache()
            for number in range(num_layers):
                model, done_tokens = self._parts.layer(number, copy_budget_bytes), 0
                for document, residual in zip(documents, hidden, strict=True):
                    self._compute(model, number, cache, document, residual)
                    done_tokens += len(document.token_ids)
                    on_share((number + done_tokens / num_tokens) / num_layers)
                del model  # before the next layer is loaded
        except torch.OutOfMemoryError:
            raise RuntimeFailure(
                FailureReason.OUT_OF_MEMORY,
                f"One layer of {self._config.model} with its activations does not fit in the GPU's memory; compare the "
                "models on a CPU (--device cpu).",
            ) from None
        return [_judged(one, residual) for one, residual in zip(documents, hidden, strict=True)]

    def head(self) -> OutputHead:
        """Load the final norm and the output head."""
        return OutputHead(self._parts.head(), self.device, self._policy)

    def _embedded(self, documents: Sequence[TokenizedDocument]) -> list[Tensor]:
        """The last token of a document predicts nothing."""
        model = self._parts.embedding()
        ids = [torch.tensor(one.token_ids[:-1], device=self.device) for one in documents]
        return [model.embed(one).cpu() for one in ids]

    def _cache(self) -> KVCache:
        """The pool of one layer, whatever its number is."""
        config, layers = self._model_config, self._model_config.num_layers
        return KVCache(
            config,
            -(-config.max_model_len // self._config.block_size_tokens),
            self._config.block_size_tokens,
            self.dtype,
            self.device,
            layout=KVLayout((None,), (0,) * layers, (0,) * layers, 1),
            zeros=self._policy.zeros,
            stored=self._config.kv_cache_dtype,
            fp8_scales=self._fp8_scales,
        )

    def _compute(
        self, model: Decoder, number: int, cache: KVCache, document: TokenizedDocument, residual: Tensor
    ) -> None:
        """One layer over one document, chunk by chunk; `residual` `[T, hidden]` is changed."""
        offset = self._model_config.rotary_offset(len(document.token_ids))
        pass_input = PassInput(cache, self._policy)
        for start in range(0, len(residual), CHUNK_TOKENS):
            stop = min(start + CHUNK_TOKENS, len(residual))
            chunk = ChunkInput(stop - start, stop, offset, 0, cache.num_blocks)
            tensors = pass_input.of(document.token_ids[start:stop], [chunk])
            self._policy.before_compute(stop - start)
            computed = residual[start:stop].to(self.device)
            model.layers[number](computed, model.step(tensors.positions, tensors.attention))
            if computed.device != residual.device:
                residual[start:stop] = computed


def _judged(document: TokenizedDocument, residual: Tensor) -> Tensor:
    rows = residual[document.num_prompt_tokens - 1 :]
    return rows if len(rows) == len(residual) else rows.clone()  # a view would keep the prompt's rows
