"""One step on the device: chunks -> step input -> forward -> sampled tokens, to be read now or later."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from millstream_runtime.engine.attention.paged_attention import KVRead
from millstream_runtime.engine.device_policy import DevicePolicy
from millstream_runtime.engine.execution.forward import Forward, LayerwiseForward, do_nothing
from millstream_runtime.engine.execution.graphs import GraphUse
from millstream_runtime.engine.execution.last_tokens import LastTokens, UnreadInputs
from millstream_runtime.engine.execution.step_input import ChunkInput, LayerSlice, StepInput, ZeroBlocks
from millstream_runtime.engine.request import TokenLogprobs
from millstream_runtime.engine.sampling import logprobs
from millstream_runtime.engine.sampling.sampler import SamplingRow, greedy, greedy_on_device, sample
from millstream_runtime.engine.scheduling.layered_prefill import ChunkSlice
from millstream_runtime.engine.scheduling.scheduler import Chunk
from millstream_runtime.engine.scheduling.sequence import Sequence
from millstream_runtime.engine.transfer import ReadBack


class Sampled(NamedTuple):
    """A sequence's next token; `token_id` is None where its logits were not finite."""

    token_id: int | None
    logprobs: TokenLogprobs | None = None


class PromptSlab(NamedTuple):
    """Rows of a step whose logits give the probabilities of a prompt's next tokens, few enough for one product.

    `first`: the position in the sequence of the first row's token.
    """

    sequence: Sequence
    first: int
    rows: range


class Launched(NamedTuple):
    """A step that the device was given: the sequences that it samples for, and `read`, which waits for their tokens."""

    sampling: list[Sequence]
    read: Callable[[], list[Sampled]]


class ModelRunner:
    """One step: its input, the forward pass and the sampled tokens. The device is read once per step.

    With several ranks this is rank 0: `broadcast` sends the others each step before rank 0 computes its own part.
    """

    def __init__(
        self,
        forward: Forward,
        eos_token_ids: frozenset[int],
        policy: DevicePolicy,
        broadcast: Callable[[StepInput | ZeroBlocks], None],
        last_tokens: LastTokens | None = None,
    ) -> None:
        """`last_tokens`: where steps overlap; None: every step is read before the next is launched."""
        self._forward = forward
        self._broadcast = broadcast
        self._policy = policy
        self._last_tokens = last_tokens
        self._in_order = _longest_first if forward.reads_in_place else _by_place
        self._device = forward.device
        self._model_config = config = forward.model.config
        # A checkpoint may name an end-of-sequence token that its vocabulary lacks: it can never come up.
        self._eos_token_ids = frozenset(one for one in eos_token_ids if 0 <= one < config.vocab_size)

    @torch.inference_mode()
    def launch(
        self, chunks: list[Chunk], layer_slice: ChunkSlice | None = None, before_slice: Callable[[], None] = do_nothing
    ) -> Launched:
        """Have all chunks computed, and a token sampled for each sequence whose chunk reaches its last known one.

        `layer_slice`: some layers of others, which are computed with the last of them. `before_slice`: see `Forward`.
        """
        whole = self._in_order(chunks)
        is_last = layer_slice is not None and layer_slice.is_last
        done = [*whole, *(self._in_order(layer_slice.chunks) if layer_slice is not None and is_last else ())]
        slabs, last_rows, sampling = _logits_rows(done)
        logits_rows = [*(list(slab.rows) for slab in slabs), *([last_rows] if last_rows else [])]
        inputs = [self._chunk_input(chunk) for chunk in whole]
        step = StepInput(
            _tokens(whole), inputs, logits_rows, None if layer_slice is None else self._slice_input(layer_slice)
        )
        self._broadcast(step)
        self._policy.before_compute(_num_tokens(whole or done))
        unread = _unread_inputs(whole)

        def between() -> None:
            before_slice()
            self._policy.before_compute(_num_tokens(layer_slice.chunks if layer_slice is not None else []))

        residual = self._forward.residual(step, lambda tokens: self._fill(tokens, unread), between)
        self._policy.before_compute(len(last_rows))
        for slab in slabs:
            self._record_prompt_logprobs(slab, self._forward.logits(residual, slab.rows))
        if not sampling:
            return Launched([], list)
        return Launched(sampling, self._sample(self._forward.logits(residual, last_rows), sampling))

    def begin_layers(self, chunks: list[Chunk], kv_read: KVRead | None) -> LayerwiseForward:
        """Begin a pass over chunks that is computed some layers per call; see `Forward.begin_layers`."""
        ordered = self._in_order(chunks)
        return self._forward.begin_layers(_tokens(ordered), [self._chunk_input(chunk) for chunk in ordered], kv_read)

    def _slice_input(self, layer_slice: ChunkSlice) -> LayerSlice:
        if not layer_slice.is_first:
            return LayerSlice(layer_slice.end_layer, [], [])
        chunks = self._in_order(layer_slice.chunks)
        return LayerSlice(layer_slice.end_layer, _tokens(chunks), [self._chunk_input(chunk) for chunk in chunks])

    def _fill(self, token_ids: Tensor, unread: UnreadInputs) -> None:
        if self._last_tokens is not None:
            self._last_tokens.fill(token_ids, unread)

    def _chunk_input(self, chunk: Chunk) -> ChunkInput:
        sequence, num_tokens = chunk
        blocks = sequence.block_table
        return ChunkInput(
            num_tokens,
            sequence.num_computed_tokens + num_tokens,
            self._model_config.rotary_offset(len(sequence.token_ids)),
            blocks[0],
            len(blocks),
            None if sequence.blocks_are_contiguous else blocks,
        )

    def _sample(self, logits: Tensor, sequences: list[Sequence]) -> Callable[[], list[Sampled]]:
        """Tokens for `logits` `[R, vocab]`; the result waits for them."""
        if all(sequence.is_plain_greedy for sequence in sequences):
            if self._last_tokens is None:
                tokens = greedy(logits)
                return lambda: [Sampled(token if token >= 0 else None) for token in tokens]
            return self._read_later(greedy_on_device(logits), sequences, dict)
        asked = [sequence.request.sampling.logprobs for sequence in sequences]
        wanted = [index for index, count in enumerate(asked) if count is not None]
        raw = logprobs.log_softmax(logits[wanted]) if wanted else None  # before the sampler changes the logits
        sampled = sample(logits, [self._sampling_row(sequence) for sequence in sequences])

        def details() -> dict[int, TokenLogprobs]:
            if raw is None:
                return {}
            entries = logprobs.describe(raw, sampled[wanted].clamp(min=0), [asked[index] or 0 for index in wanted])
            return dict(zip(wanted, entries, strict=True))

        return self._read_later(sampled, sequences, details)

    def _read_later(
        self, sampled: Tensor, sequences: list[Sequence], details: Callable[[], dict[int, TokenLogprobs]]
    ) -> Callable[[], list[Sampled]]:
        if self._last_tokens is not None:
            self._last_tokens.keep([one.row for one in sequences if one.row is not None], sampled)
        back = ReadBack(sampled)

        def read() -> list[Sampled]:
            entries = details()
            return [
                Sampled(token, entries.get(index)) if token >= 0 else Sampled(None)
                for index, token in enumerate(back.tolist())
            ]

        return read

    def _record_prompt_logprobs(self, slab: PromptSlab, logits: Tensor) -> None:
        """`logits` `[rows, vocab]` predict the tokens behind each row."""
        sequence, first, last = slab.sequence, slab.first, slab.first + len(slab.rows)
        targets = torch.tensor(sequence.token_ids[first + 1 : last + 1], device=self._device)
        count = sequence.request.sampling.prompt_logprobs or 0
        raw = logprobs.log_softmax(logits)
        sequence.prompt_logprobs += logprobs.describe(raw, targets, [count] * (last - first))

    @property
    def graphs(self) -> GraphUse | None:
        """None where every step is eager."""
        return None if self._forward.graphs is None else self._forward.graphs.use

    def zero_blocks(self, blocks: list[int]) -> None:
        """Zero the KV blocks of a sequence with NaN or infinite numbers, before another request gets them."""
        self._broadcast(ZeroBlocks(blocks))
        self._forward.zero_blocks(blocks)

    def must_recompute(self, sequence: Sequence) -> bool:
        """Whether the last known token, read or not, makes all cached keys of the sequence stale (longrope)."""
        return self._model_config.must_recompute(len(sequence.token_ids))

    def kv_variant(self, num_known_tokens: int) -> int:
        """Equal numbers: equal tokens have equal keys. It differs where the length turns the angles (longrope)."""
        return self._model_config.rotary_offset(num_known_tokens)

    def _sampling_row(self, sequence: Sequence) -> SamplingRow:
        params = sequence.request.sampling
        suppressed: frozenset[int] = frozenset()
        if sequence.num_generated_tokens < params.min_tokens:
            suppressed = params.stop_token_ids | (frozenset() if params.ignore_eos else self._eos_token_ids)
        return SamplingRow(
            params,
            sequence.seed,
            len(sequence.token_ids),
            suppressed,
            sequence.token_counts,
            sequence.token_ids[sequence.num_prompt_tokens :] if sequence.processors else (),
            sequence.processors,
        )


def _by_place(chunks: list[Chunk]) -> list[Chunk]:
    """Decodes first, in the order of their places in the pool: see TorchAttention."""
    return sorted(chunks, key=lambda chunk: (chunk.num_tokens > 1, chunk.sequence.block_table[0]))


def _longest_first(chunks: list[Chunk]) -> list[Chunk]:
    """Decodes first, scattered ones last of these, so that FlashAttention takes the others in one call. In it the
    longest begin first, or the call would end with one of them alone on the device."""

    def key(chunk: Chunk) -> tuple[bool, bool, int]:
        sequence, num_tokens = chunk
        return num_tokens > 1, not sequence.blocks_are_contiguous, -sequence.num_computed_tokens - num_tokens

    return sorted(chunks, key=key)


def _num_tokens(chunks: list[Chunk]) -> int:
    return sum(chunk.num_tokens for chunk in chunks)


def _tokens(chunks: list[Chunk]) -> list[int]:
    token_ids: list[int] = []
    for sequence, num_tokens in chunks:
        start = sequence.num_computed_tokens
        token_ids += sequence.token_ids[start : start + num_tokens]
    return token_ids


def _unread_inputs(chunks: list[Chunk]) -> UnreadInputs:
    """Which of the chunks' tokens only the device has: those of decodes whose last step is not read."""
    unread, num_rows = UnreadInputs([], []), 0
    for sequence, num_tokens in chunks:
        num_rows += num_tokens
        if sequence.num_unread_tokens and sequence.row is not None:
            unread.places.append(num_rows - 1)
            unread.rows.append(sequence.row)
    return unread


def _logits_rows(chunks: list[Chunk]) -> tuple[list[PromptSlab], list[int], list[Sequence]]:
    """Rows of the chunks, one after another: those of prompt log-probabilities, those that are sampled, for whom."""
    slabs: list[PromptSlab] = []
    last_rows: list[int] = []
    sampling: list[Sequence] = []
    num_rows = 0
    for chunk in chunks:
        sequence = chunk.sequence
        if sequence.request.sampling.prompt_logprobs is not None:
            if not sequence.prompt_logprobs:
                sequence.prompt_logprobs.append(None)  # nothing comes before the first token
            slabs += _prompt_slabs(chunk, first_row=num_rows)
        num_rows += chunk.num_tokens
        if chunk.samples:
            last_rows.append(num_rows - 1)
            sampling.append(sequence)
    return slabs, last_rows, sampling


def _prompt_slabs(chunk: Chunk, first_row: int) -> list[PromptSlab]:
    """The rows of a chunk, which begins at `first_row`, whose predictions are asked for and not known yet."""
    sequence, start = chunk.sequence, chunk.sequence.num_computed_tokens
    stop = min(start + chunk.num_tokens, sequence.num_prompt_tokens - 1)
    known, step = len(sequence.prompt_logprobs) - 1, logprobs.PROMPT_SLAB_ROWS
    shift = first_row - start
    return [
        PromptSlab(sequence, first, range(first + shift, min(first + step, stop) + shift))
        for first in range(max(start, known), stop, step)
    ]
