"""One step on the device: chunks -> step input -> forward -> sampled tokens, to be read now or later."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from millstream_runtime.draft_tree import DraftTree
from millstream_runtime.engine.device_events import Mark
from millstream_runtime.engine.device_policy import DevicePolicy
from millstream_runtime.engine.execution.forward import Forward
from millstream_runtime.engine.execution.graphs.graphed_decodes import GraphPlan, GraphUse
from millstream_runtime.engine.execution.last_tokens import LastTokens
from millstream_runtime.engine.execution.step_input import BlockRun, ChunkInput, StepInput, ZeroBlocks
from millstream_runtime.engine.execution.step_order import order_of
from millstream_runtime.engine.execution.step_rows import (
    PromptSlab,
    SampledRow,
    rows_with_logits,
    tokens_of,
    unread_inputs,
)
from millstream_runtime.engine.request import TokenLogprobs
from millstream_runtime.engine.sampling import logprobs
from millstream_runtime.engine.sampling.logprobs import Described, DescribeTokens
from millstream_runtime.engine.sampling.rejection import Proposal
from millstream_runtime.engine.sampling.sampler import SamplerKernels, SamplingRow, greedy, greedy_on_device, sample
from millstream_runtime.engine.sampling.token_counts import History, TokenCounts
from millstream_runtime.engine.scheduling.sequence import BlockTable, Sequence
from millstream_runtime.engine.scheduling.step_plan import Chunk
from millstream_runtime.engine.transfer import ReadBack, on_device


class Sampled(NamedTuple):
    """A sequence's next token; `token_id` is None where its logits were not finite."""

    token_id: int | None
    logprobs: TokenLogprobs | None = None


class Launched(NamedTuple):
    """A step that the device was given: the sequences that it samples for, and `read`, which waits for their tokens.

    There is a token for each sequence, behind its last known token, and one more behind each of its drafts.
    """

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
        token_counts: TokenCounts,
        last_tokens: LastTokens | None = None,
        kernels: SamplerKernels | None = None,
        graph_plan: GraphPlan | None = None,
        tree: DraftTree | None = None,
    ) -> None:
        """`last_tokens`: where steps overlap; None: every step is read before the next is launched. `kernels`: what
        samples; None: torch. `graph_plan`: which steps are replayed; None: every step is eager. `tree`: of all drafts;
        None: each follows the one before it."""
        self._graph_plan, self._tree = graph_plan, tree
        self._forward = forward
        self._kernels = kernels
        self._broadcast = broadcast
        self._policy = policy
        self._last_tokens, self._token_counts = last_tokens, token_counts
        self._in_order = order_of(forward)
        self.device = forward.device
        self._model_config = config = forward.model.config
        # A checkpoint may name an end-of-sequence token that its vocabulary lacks: it can never come up.
        self._eos_token_ids = frozenset(one for one in eos_token_ids if 0 <= one < config.vocab_size)

    @torch.inference_mode()
    def launch(self, chunks: list[Chunk]) -> Launched:
        """Have all chunks computed, and a token sampled for each sequence whose chunk reaches its last known one, and
        behind each of its drafts."""
        ordered = self._in_order(chunks)
        slabs, last_rows, sampled = rows_with_logits(ordered)
        logits_rows = [*(list(slab.rows) for slab in slabs), *([last_rows] if last_rows else [])]
        step = self._step_input(ordered, logits_rows, sampled)
        self._broadcast(step)
        self._policy.before_compute(len(step.token_ids))
        residual = self._forward.residual(step, lambda tokens: self._fill(tokens, step))
        self._policy.before_compute(len(last_rows))
        head_rows = step.head_rows
        prompts = [
            self._describe_prompt(slab, self._forward.logits(residual, rows))
            for slab, rows in zip(slabs, head_rows, strict=False)
        ]
        logits = self._forward.logits(residual, head_rows[-1]) if sampled else None
        sample = self._read_nothing() if logits is None else self._sample(logits, sampled, step.kept_rows)
        sampling = [row.sequence for row in sampled if not row.num_drafts]

        def read() -> list[Sampled]:
            for record in prompts:
                record()
            return sample()

        return Launched(sampling, read if prompts else sample)

    def _step_input(self, chunks: list[Chunk], logits_rows: list[list[int]], sampled: list[SampledRow]) -> StepInput:
        places, rows = unread_inputs(chunks)
        kept = [] if self._last_tokens is None else [_row(one.sequence) for one in sampled]
        inputs = [self._chunk_input(chunk) for chunk in chunks]
        bucket = None if self._graph_plan is None else self._graph_plan.bucket_of(inputs)
        return StepInput(tokens_of(chunks), inputs, logits_rows, places, rows, kept, bucket)

    def _fill(self, token_ids: Tensor, step: StepInput) -> None:
        if self._last_tokens is not None:
            self._last_tokens.fill(token_ids, step)

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
            [_block_run(table) for table in sequence.other_tables],
            len(sequence.draft_ids),
            () if self._tree is None else self._tree.parents[: len(sequence.draft_ids)],
            sequence.row,
            (sequence.arrival, sequence.num_releases),
            self._num_read_rows(chunk),
        )

    def _num_read_rows(self, chunk: Chunk) -> int | None:
        """All where a head that drafts reads the states of all tokens, or log-probabilities of the prompt are asked."""
        sequence = chunk.sequence
        if self._forward.keep_states is not None or sequence.request.sampling.prompt_logprobs is not None:
            return None
        return 1 + len(sequence.draft_ids) if chunk.samples else 0

    def _sample(self, logits: Tensor, rows: list[SampledRow], kept_rows: list[int]) -> Callable[[], list[Sampled]]:
        """Tokens for `logits` `[R, vocab]`; the result waits for them. `kept_rows`: see `StepInput`."""
        if all(row.sequence.is_plain_greedy for row in rows):
            if self._last_tokens is None:
                tokens = greedy(logits)
                return lambda: [Sampled(token if token >= 0 else None) for token in tokens]
            return self._read_later(greedy_on_device(logits), kept_rows, dict)
        asked = [row.sequence.request.sampling.logprobs for row in rows]
        wanted = [index for index, count in enumerate(asked) if count is not None]
        place = on_device(wanted, self.device) if 0 < len(wanted) < len(rows) else None
        # Before the sampler changes the logits.
        raw = self._kept(_select(logits, place)) if wanted else None
        choose = None if self._kernels is None else self._kernels.choose
        sampled = sample(logits, [self._sampling_row(row) for row in rows], self._token_counts, choose)
        if raw is None:
            return self._read_later(sampled, kept_rows, dict)
        token_ids = _select(sampled, place).clamp(min=0)
        described = Described(raw, token_ids, [asked[index] or 0 for index in wanted], self._describe)
        return self._read_later(sampled, kept_rows, lambda: dict(zip(wanted, described.entries(), strict=True)))

    @property
    def _describe(self) -> DescribeTokens:
        return logprobs.describe if self._kernels is None else self._kernels.describe

    def _kept(self, logits: Tensor) -> Tensor:
        """What `_describe` needs of `logits`, which the sampler may change where they are float32."""
        if self._kernels is None:
            return logprobs.log_softmax(logits)
        return logits.clone() if logits.dtype == torch.float32 else logits

    def _read_nothing(self) -> Callable[[], list[Sampled]]:
        """For a step that samples nothing. What is returned waits for it: or the host would launch all chunks of a
        prompt at once, and whoever comes meanwhile would wait for all."""
        computed = Mark(self.device)

        def read() -> list[Sampled]:
            computed.wait()
            return []

        return read

    def _read_later(
        self, sampled: Tensor, kept_rows: list[int], details: Callable[[], dict[int, TokenLogprobs]]
    ) -> Callable[[], list[Sampled]]:
        if self._last_tokens is not None:
            self._last_tokens.keep(kept_rows, sampled)
        back = ReadBack(sampled)

        def read() -> list[Sampled]:
            entries = details()
            return [
                Sampled(token, entries.get(index)) if token >= 0 else Sampled(None)
                for index, token in enumerate(back.tolist())
            ]

        return read

    def _describe_prompt(self, slab: PromptSlab, logits: Tensor) -> Callable[[], None]:
        """`logits` `[rows, vocab]` predict the tokens behind each row. What is returned waits, and records them."""
        sequence, first, last = slab.sequence, slab.first, slab.first + len(slab.rows)
        targets = on_device(sequence.token_ids[first + 1 : last + 1], self.device)
        count = sequence.request.sampling.prompt_logprobs or 0
        described = Described(self._kept(logits), targets, [count] * (last - first), self._describe)
        start = len(sequence.prompt_logprobs)
        sequence.prompt_logprobs += [None] * (last - first)  # the next chunk goes on behind them

        def record() -> None:
            sequence.prompt_logprobs[start : start + last - first] = described.entries()

        return record

    def forget_step(self, token_counts: TokenCounts) -> None:
        """A step failed half-way: nothing of it counts. `token_counts`: empty ones."""
        self._token_counts = token_counts

    @property
    def graphs(self) -> GraphUse | None:
        """None where every step is eager."""
        return None if self._graph_plan is None else self._graph_plan.use

    def zero_blocks(self, blocks: list[int]) -> None:
        """Zero the KV blocks of a sequence with NaN or infinite numbers, before another request gets them."""
        self._broadcast(ZeroBlocks(blocks))
        self._forward.zero_blocks(blocks)

    def keep_drafts(self, sequence: Sequence, nodes: Seq[int]) -> None:
        """Have the keys, values and states of drafts that stand as if each had been behind the one before it.

        `nodes`: of the tree of the check that was just read. Their places are behind the computed tokens.
        """
        places = [(node, level) for level, node in enumerate(nodes) if node != level]
        sources: list[int] = []
        targets: list[int] = []
        first, block = sequence.num_computed_tokens, self._forward.block_size_tokens
        for blocks in (sequence.block_table, *(table.block_table for table in sequence.other_tables)):
            sources += [_slot(blocks, first + node, block) for node, _ in places]
            targets += [_slot(blocks, first + level, block) for _, level in places]
        if places:
            with torch.inference_mode():
                self._forward.move(sources, targets)

    def must_recompute(self, sequence: Sequence) -> bool:
        """Whether the last known token, read or not, makes all cached keys of the sequence stale (longrope)."""
        return self._model_config.must_recompute(len(sequence.token_ids))

    def kv_variant(self, num_known_tokens: int) -> int:
        """Equal numbers: equal tokens have equal keys. It differs where the length turns the angles (longrope)."""
        return self._model_config.rotary_offset(num_known_tokens)

    def _sampling_row(self, row: SampledRow) -> SamplingRow:
        sequence, num_drafts = row
        params, drafts = sequence.request.sampling, self._drafts_before(row)
        suppressed: frozenset[int] = frozenset()
        if sequence.num_generated_tokens + len(drafts) < params.min_tokens:
            suppressed = params.stop_token_ids | (frozenset() if params.ignore_eos else self._eos_token_ids)
        return SamplingRow(
            params,
            sequence.seed,
            len(sequence.token_ids) + len(drafts),
            suppressed,
            _history(sequence, drafts),
            [*sequence.token_ids[sequence.num_prompt_tokens :], *drafts] if sequence.processors else (),
            sequence.processors,
            _proposal(sequence, num_drafts),
        )

    def _drafts_before(self, row: SampledRow) -> list[int]:
        drafts = row.sequence.draft_ids
        if self._tree is None:
            return drafts[: row.num_drafts]
        return [drafts[node] for node in self._tree.path(row.num_drafts - 1)]


def _proposal(sequence: Sequence, num_drafts: int) -> Proposal | None:
    """The draft behind `num_drafts` drafts, if it was drawn from a distribution that is known."""
    if num_drafts >= min(len(sequence.draft_ids), len(sequence.proposals)):
        return None
    proposal = sequence.proposals[num_drafts]
    return proposal if proposal.token_id == sequence.draft_ids[num_drafts] else None


def _slot(blocks: Seq[int], place: int, block_size_tokens: int) -> int:
    return blocks[place // block_size_tokens] * block_size_tokens + place % block_size_tokens


def _block_run(table: BlockTable) -> BlockRun:
    blocks = table.block_table
    return BlockRun(blocks[0], len(blocks), None if table.blocks_are_contiguous else blocks)


def _select(tensor: Tensor, place: Tensor | None) -> Tensor:
    """Rows of `tensor`; all where `place` is None."""
    return tensor if place is None else tensor.index_select(0, place)


def _row(sequence: Sequence) -> int:
    if sequence.row is None:
        raise RuntimeError(f"request {sequence.request.request_id!r} is in a step without a row")
    return sequence.row


def _history(sequence: Sequence, drafts: list[int]) -> History | None:
    """`drafts`: those before the row."""
    params = sequence.request.sampling
    if not params.is_penalised:
        return None
    counts_prompt = params.repetition_penalty != 1.0
    known, num_prompt = sequence.token_ids, sequence.num_prompt_tokens
    checked = drafts if sequence.draft_ids else None
    return History(_row(sequence), sequence.arrival, known, num_prompt, counts_prompt, checked)
