"""The sequences that wait, and which client's turn it is: fair queueing of clients in tokens.

A client is the holder of an API key; without keys all requests are of one client. Each client has a count of served
tokens: those of its prompts and answers that steps computed, each once, while anybody waited. The turn is that of the
client with the lowest count, and among the requests of one client `waiting_order` decides. So a client cannot delay
another one by its priorities, by many requests, or by long ones. This is deficit round robin (Shreedhar and Varghese
1995) with counts instead of deficits, because the length of an answer is not known before it ends: the virtual token
counter of Sheng et al. 2024 (arXiv 2401.00588).

    client    waiting (in order)     served      next
    a         a3 a4 a5 a6 ...        900
    b         b1                     640         b1, then a3
    c         -                      700         nothing waits: it takes no turn

- **Rank.** Whoever keeps the keys may let some rank above the others. Such a client counts as served RANK_TOKENS less,
  so that its turn comes before that of any other without a rank, and its rows are the last to be taken; among clients
  of one rank the counts decide. While it asks for more than the server can do, the others wait.
- **No credit.** A client of whom nothing waits claims nothing. When it begins to wait, its count rises to the lowest
  of the clients of its rank that wait. While no request waits, none is delayed, and all counts are 0.
- **No discount.** What a client cancels stays counted as far as it was computed. What the prefix cache held, drafts
  that stood, and what is computed again after a preemption cost no turn, and do not count.
- **Answers under way.** A client whose answers hold all rows could keep others waiting for as long as these answers
  last. So a client that is QUANTUM_TOKENS behind gets a row of one that has more rows (`step_plan`). Of all tokens at
  most one in SERVED_PER_RECOMPUTED is computed again for that, and BURST_TOKENS.

Pure: no torch, no clock.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq

from millstream_runtime.engine.scheduling.sequence import Sequence

QUANTUM_TOKENS = 256
SERVED_PER_RECOMPUTED = 100
BURST_TOKENS = 512
RANK_TOKENS = 1 << 60  # more than a client is ever served
MOST_IDLE_COUNTS = 4096  # more keys than a server accepts: beyond them, counts that change nothing are dropped


class Turns:
    """Sequences of several clients, merged: the head is the first one of the client with the lowest count.

    Among equal counts the first to arrive is first, whatever its priority. Those of one client keep their order.
    """

    def __init__(self, queues: Iterable[Seq[Sequence]], tokens_of: Callable[[str], int]) -> None:
        """`queues`: one per client, none empty. `tokens_of`: the count of a client at the start."""
        self._heap = [_turn(queue, 0, tokens_of(queue[0].request.client)) for queue in queues]
        heapq.heapify(self._heap)

    @property
    def head(self) -> Sequence | None:
        """The next sequence; None behind the last one."""
        if not self._heap:
            return None
        *_, place, queue = self._heap[0]
        return queue[place]

    def take(self, num_tokens: int) -> None:
        """Go on behind the head, which counts `num_tokens` for its client."""
        tokens, _, place, queue = self._heap[0]
        if place + 1 < len(queue):
            heapq.heapreplace(self._heap, _turn(queue, place + 1, tokens + num_tokens))
        else:
            heapq.heappop(self._heap)


def _turn(queue: Seq[Sequence], place: int, tokens: int) -> tuple[int, int, int, Seq[Sequence]]:
    """Arrivals differ, so places and queues are never compared."""
    return tokens, queue[place].arrival, place, queue


class FairQueue:
    """The waiting sequences of all clients, and what each client was served.

    Adding and removing cost what they cost in one sorted list. Counting a step costs the sequences in it, and choosing
    whose turn it is costs the clients of whom something waits.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, list[Sequence]] = {}  # of each client of whom something waits, in order
        self._served: dict[str, int] = {}  # tokens; a client without an entry has 0
        self._num_waiting = 0
        self._above: set[str] = set()  # clients that rank above the others, of those of whom something waited
        self._recomputable = float(BURST_TOKENS)

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        """All that wait, client by client."""
        for waiting in self._waiting.values():
            yield from waiting

    def add(self, sequence: Sequence) -> None:
        """Add a sequence to those of its client, in their order."""
        client = sequence.request.client
        self._note_rank(client, ranks_above=sequence.request.client_ranks_above)
        if client not in self._waiting:
            self._begin_to_wait(client)
        bisect.insort(self._waiting[client], sequence, key=order_of)
        self._num_waiting += 1

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out: it is admitted, or was cancelled."""
        client = sequence.request.client
        waiting = self._waiting[client]
        del waiting[bisect.bisect_left(waiting, order_of(sequence), key=order_of)]
        self._num_waiting -= 1
        if not waiting:
            del self._waiting[client]

    def served_tokens(self, client: str) -> int:
        """What the client was served, in this time in which somebody waits; RANK_TOKENS less for one of rank."""
        return self._served.get(client, 0) - (RANK_TOKENS if client in self._above else 0)

    def turns(self, pending: Mapping[str, int]) -> Turns:
        """In which order the waiting are admitted. `pending`: by client, uncomputed tokens of its admitted prompts."""
        return Turns(self._waiting.values(), lambda client: self.served_tokens(client) + pending.get(client, 0))

    def count(self, sequence: Sequence) -> None:
        """Count what a step has computed of a sequence for the first time."""
        num_tokens = sequence.num_computed_tokens - sequence.num_counted_tokens
        if num_tokens <= 0:
            return
        sequence.num_counted_tokens = sequence.num_computed_tokens
        self._recomputable = min(BURST_TOKENS, self._recomputable + num_tokens / SERVED_PER_RECOMPUTED)
        if self._waiting:
            client = sequence.request.client
            self._served[client] = self._served.get(client, 0) + num_tokens
        elif self._served:
            self._served.clear()

    def may_recompute(self, num_tokens: int) -> bool:
        """Whether the throughput allows a preemption after which `num_tokens` are computed again."""
        return self._recomputable >= min(num_tokens, BURST_TOKENS)

    def count_recomputed(self, num_tokens: int) -> None:
        """Count tokens that are computed again because their client was served more than another."""
        self._recomputable -= num_tokens

    def _begin_to_wait(self, client: str) -> None:
        if not self._waiting:
            self._served.clear()
        else:
            if len(self._served) > MOST_IDLE_COUNTS:
                self._drop_idle_counts()
            self._served[client] = max(self._served.get(client, 0), self._least_served(client in self._above))
        self._waiting[client] = []

    def _least_served(self, above: bool) -> int:
        """The lowest count of the clients of a rank that wait; 0 where none does."""
        counts = (self._served.get(other, 0) for other in self._waiting if (other in self._above) is above)
        return min(counts, default=0)

    def _drop_idle_counts(self) -> None:
        least = {above: self._least_served(above) for above in (False, True)}
        self._served = {
            other: tokens
            for other, tokens in self._served.items()
            if tokens > least[other in self._above] or other in self._waiting
        }
        self._above.intersection_update(self._served.keys() | self._waiting.keys())

    def _note_rank(self, client: str, *, ranks_above: bool) -> None:
        """Take a client's rank from its newest request: the file of keys may have changed."""
        if ranks_above:
            if len(self._above) > MOST_IDLE_COUNTS:  # keys of files of long ago
                self._above.clear()
            self._above.add(client)
        else:
            self._above.discard(client)


def order_of(sequence: Sequence) -> tuple[int, int]:
    """Sort key among the sequences of one client: the order, then the arrival."""
    return sequence.order, sequence.arrival
