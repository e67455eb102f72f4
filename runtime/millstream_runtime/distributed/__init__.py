"""Tensor parallelism: one process per rank, all in one pod.

    rank 0: the engine                                  ranks 1 … n-1: `python -m …distributed.follower`
    scheduler, sampler, server behind it
    Leader ──LoadShard, StepInput, …── Unix socket ──────▶   the same forward pass over their shares
           ◀──ShardLoaded, RankFailed, …──
    all_reduce, gather, broadcast ◀── NCCL or gloo ──▶

Rank 0 alone schedules requests and samples tokens. If every rank did both, this message would be saved, but every rank
would need all logits, the sampler's state (penalties, grammars, seeds) and bit-equal decisions: one rank that rounds
differently, and answers diverge silently. A step's message is a few bytes per request and takes tens of microseconds;
the sampled tokens travel with the next one, or where steps overlap from device to device (`last_tokens`).

`messages` and `channel` carry commands and replies, `process_group` the tensors; `leader` and `follower` are the two
ends; `probe` finds out what connects the ranks, and `topology` is its result.
"""
