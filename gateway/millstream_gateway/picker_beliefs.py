"""What one picker believes of the replicas: the prefixes that each holds, and what was sent there since its report.

Nothing here is shared between pickers. What one believes wrongly, because others sent requests too, the reports of
answered requests correct.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from millstream_gateway.believed_cache import BelievedCache
from millstream_gateway.decisions import Decision, UnansweredDecisions
from millstream_gateway.guesses import GuessedShare
from millstream_gateway.prefix_chunks import CHUNK_BYTES
from millstream_gateway.replica_report import Answer, Replica, ReplicaReport, id_hash
from millstream_gateway.routed_request import RoutedRequest
from millstream_gateway.token_ratio import TokenRatio

FIRST_ANSWER_TOKENS = 128.0
NEW_ANSWER_SHARE = 0.01  # of the mean length of answers: the last hundred count


class PickerBeliefs:
    """Beliefs of one picker about the replicas of one model."""

    def __init__(self) -> None:
        self.ratio = TokenRatio()
        self.guessed_share = GuessedShare()
        self.answer_tokens = FIRST_ANSWER_TOKENS  # mean
        self.num_decisions = 0
        self._replicas: dict[str, _ReplicaBeliefs] = {}

    def prompt_tokens(self, request: RoutedRequest) -> float:
        """Return how many tokens its prompt has, as far as is known before a replica has read it."""
        return self.ratio.tokens(request.text_bytes)

    def held_chunks(self, endpoint: str, request: RoutedRequest) -> int:
        """Return how many chunks of the prompt the replica is believed to hold, from the first on."""
        beliefs = self._replicas.get(endpoint)
        return beliefs.cache.held_chunks(request.chunks) if beliefs else 0

    def guessed_tokens(self, request: RoutedRequest) -> float:
        """Return how many tokens of the turn before are to be expected where it is guessed to have gone."""
        return self.guessed_share.mean * self.ratio.tokens(request.previous_bytes)

    def sent_since(self, replica: Replica) -> Iterator[Decision]:
        """Yield the decisions for this replica that its report cannot know of, newest first."""
        beliefs = self._replicas.get(replica.endpoint)
        return beliefs.unanswered.since(replica.reported_at_seconds) if beliefs else iter(())

    def decide(self, request: RoutedRequest, endpoint: str, now_seconds: float, *, is_guess: bool = False) -> None:
        """Record that the request goes to this replica, which will hold its prefix. `is_guess`: of `Candidate`."""
        self.num_decisions += 1
        beliefs = self._of(endpoint)
        held = request.chunks[: beliefs.cache.held_chunks(request.chunks)]
        prompt_tokens = self.prompt_tokens(request)
        decision = Decision(
            request,
            self.num_decisions,
            now_seconds,
            prompt_tokens,
            prompt_tokens - self.ratio.tokens(len(held) * CHUNK_BYTES),
            tuple(beliefs.cache.last_use(chunk) or 0 for chunk in held),
            is_guess,
        )
        beliefs.unanswered.add(id_hash(request.request_id), decision)
        beliefs.cache.use(request.chunks, self.num_decisions)

    def observe_report(self, endpoint: str, report: ReplicaReport, answers: Sequence[Answer]) -> None:
        """Correct the beliefs. `answers`: those that were not in the report before."""
        beliefs = self._of(endpoint)
        if beliefs.boot_id not in ("", report.boot_id):
            beliefs.cache.clear()
            beliefs.unanswered.clear()
        beliefs.boot_id = report.boot_id
        if report.total_blocks:
            beliefs.cache.resize(int(report.capacity_tokens * self.ratio.bytes_per_token / CHUNK_BYTES))
        for answer in answers:
            self._observe_answer(beliefs, answer)

    def keep_only(self, endpoints: Collection[str]) -> None:
        """Forget replicas that are gone."""
        for endpoint in self._replicas.keys() - set(endpoints):
            del self._replicas[endpoint]

    def _of(self, endpoint: str) -> _ReplicaBeliefs:
        if endpoint not in self._replicas:
            self._replicas[endpoint] = _ReplicaBeliefs()
        return self._replicas[endpoint]

    def _observe_answer(self, beliefs: _ReplicaBeliefs, answer: Answer) -> None:
        self.answer_tokens += NEW_ANSWER_SHARE * (answer.completion_tokens - self.answer_tokens)
        decision = beliefs.unanswered.pop(answer.id)
        if decision is None:  # another picker's
            brought = answer.prompt_tokens - answer.cached_tokens + answer.completion_tokens
            num_chunks = int(brought * self.ratio.bytes_per_token / CHUNK_BYTES)
            beliefs.cache.fill(num_chunks, self.num_decisions)
            return
        text_bytes = decision.request.text_bytes
        self.ratio.observe(text_bytes, answer.prompt_tokens)
        if decision.is_guess and answer.prompt_tokens:
            previous_tokens = answer.prompt_tokens * decision.request.previous_bytes / text_bytes
            self.guessed_share.observe(answer.cached_tokens / previous_tokens)
        if answer.prompt_tokens:
            chunk_tokens = CHUNK_BYTES * answer.prompt_tokens / text_bytes
            # A replica caches whole blocks, so the last chunk that it holds may lack some tokens.
            held_chunks = int(answer.cached_tokens / chunk_tokens + 0.5)
            if held_chunks < len(decision.last_uses):
                beliefs.cache.forget_older(decision.last_uses[held_chunks])


class _ReplicaBeliefs:
    def __init__(self) -> None:
        self.boot_id = ""
        self.cache = BelievedCache(UNREPORTED_CAPACITY_CHUNKS)
        self.unanswered = UnansweredDecisions()


UNREPORTED_CAPACITY_CHUNKS = 1024  # some 64,000 tokens, until a replica has reported its own
