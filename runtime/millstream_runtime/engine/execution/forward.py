"""The model's pass over one step: the part that every rank computes alike. Rank 0 alone samples from it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from torch import Tensor

from millstream_runtime.engine.attention import varlen_attention
from millstream_runtime.engine.device_policy import DevicePolicy
from millstream_runtime.engine.execution.graphs.graphed_decodes import FillTokens, GraphedDecodes, leave_tokens
from millstream_runtime.engine.execution.pass_input import PassInput
from millstream_runtime.engine.execution.step_input import ChunkInput, StepInput
from millstream_runtime.engine.kernel_backends import Backend
from millstream_runtime.engine.kv.kv_cache import KVCache
from millstream_runtime.engine.transfer import on_device
from millstream_runtime.models.layers.decoder import Decoder


class Forward:
    """A model (or a rank's share) and its KV pool.

    Attributes:
        keep_states: is given the slots of all tokens of each step, the number of a layer and the residual stream before
            it, and at last the number of layers and that behind them; None: nothing needs them.
        move_states: copies what was kept of slots to others; see `move`.
    """

    keep_states: Callable[[Tensor, int, Tensor], None] | None = None
    move_states: Callable[[Tensor, Tensor], None] | None = None

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        policy: DevicePolicy,
        graphs: GraphedDecodes | None = None,
        backend: Backend = Backend.TORCH,
        longest_window: int | None = None,
    ) -> None:
        """`graphs`: replays the steps that name a bucket. `backend`: what computes the attention of the other steps.
        `longest_window`: no layer reads further back, whatever its own window is; None: no bound."""
        self.model = model
        self._cache = cache
        self._pass_input = PassInput(cache, policy, backend, longest_window)
        self.device = cache.heads[0].device
        self.reads_in_place = varlen_attention.can_serve(model.config, cache.heads[0])
        self.graphs = graphs
        self.longest_window = longest_window

    @property
    def num_groups(self) -> int:
        """Groups of layers that have a block table each."""
        return self._cache.layout.num_groups

    def residual(self, step: StepInput, fill: FillTokens = leave_tokens) -> Tensor:
        """Return the last layer's residual stream of all tokens, `[T, hidden]`, or of `step.last_layer_rows`; the next
        step may overwrite it.

        `fill` puts the tokens that only the device knows into those of the step's chunks, `[T]` there.
        """
        if step.bucket is not None and self.graphs is not None:
            return self.graphs.residual(step.bucket, step, fill)
        tensors = self._pass_input.of(step.token_ids, step.chunks, step.last_layer_rows)
        fill(tensors.token_ids)
        inputs = tensors.token_ids, tensors.positions, tensors.attention
        if self.keep_states is None:
            return self.model.forward(*inputs, read=tensors.read)
        return self.model.forward(*inputs, watch=functools.partial(self.keep_states, tensors.slots))

    def compute_first_layers(self, token_ids: list[int], chunks: Sequence[ChunkInput], num_layers: int) -> None:
        """Compute the first layers of a step alone, to measure what they take."""
        tensors = self._pass_input.of(token_ids, chunks)
        self.model.forward(tensors.token_ids, tensors.positions, tensors.attention, num_layers)

    def logits(self, residual: Tensor, rows: Sequence[int]) -> Tensor:
        """`[len(rows), vocab]` of some rows of `residual`, ascending; on ranks beyond 0 none."""
        first, count = rows[0], len(rows)
        if rows[-1] - first + 1 == count:
            return self.model.logits(residual[first : first + count])
        return self.model.logits(residual[on_device(rows, self.device)])

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy keys, values and kept states of slots to other slots. They may overlap."""
        slots = on_device([sources, targets], self.device)
        self._cache.move(slots[0], slots[1])
        if self.move_states is not None:
            self.move_states(slots[0], slots[1])

    @property
    def block_size_tokens(self) -> int:
        """Of the KV pool."""
        return self._cache.block_size_tokens

    def zero_blocks(self, blocks: list[int]) -> None:
        """Zero KV blocks, before another request gets them."""
        self._cache.zero_blocks(blocks)
