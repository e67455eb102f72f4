"""What `millstream tune-draft` needs in memory; the operator sizes its Job by these. Imports nothing."""

from __future__ import annotations

PARAMETER_BYTES = 16  # weight, gradient and two moments in float32
SCRATCH_BYTES = 1 << 30  # activations and logits of a step
TOP = 32  # tokens of the target's distribution that are kept at each position; fewer where the vocabulary has fewer
MAX_TRAINING_POSITIONS = 2_000_000
ANSWERS_BYTES = 6 * TOP * MAX_TRAINING_POSITIONS
POOL_REQUESTS = 40  # of full length, for which the target's KV pool has room
