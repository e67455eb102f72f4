"""Tensor parallelism: one process a rank, all in one pod.

    rank 0: the engine                                  ranks 1 … n-1: `python -m …distributed.follower`
    scheduler, sampler, server behind it
    Leader ──LoadShard, StepInput, …── Unix socket ──────▶   the same forward pass over their shares
           ◀──ShardLoaded, RankFailed, …──
    all_reduce, gather ◀──────── NCCL or gloo ───────▶

Requests are scheduled and tokens sampled on rank 0 alone. The other way, every rank scheduling and sampling alike,
saves this message but needs all logits everywhere, the sampler's state (penalties, grammars, seeds) on every rank, and
bit-equal decisions for ever: one rank that rounds otherwise, and answers diverge in silence. A step's message is a few
bytes a request and takes tens of microseconds; the sampled tokens travel with the next one.

`messages` and `channel` are the conversation, `process_group` the tensors, `leader` and `follower` the two ends of it,
`probe` finds out what connects them, and `topology` is the finding.
"""
