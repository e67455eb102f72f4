"""How probable it is that drafts stand: per request, and per place in a run of drafts. Pure: no torch, no clock.

    draft          1     2     3     4
    stands if      all before it stand, and then with the rate of its place
    marginal      .8   .68   .61   .58      that it stands at all: the product of the rates up to it

Leviathan et al. 2023 (arXiv 2211.17192) have one rate for all places; drafts from the request itself stand or fall in
long runs, so the rate of the second is higher than that of the first. A request begins with the rates of those before
it, and soon has its own: so one that is hard to guess is left alone in a batch of others.
"""

from __future__ import annotations

from collections.abc import Hashable

POOL_DECAY, REQUEST_DECAY = 0.98, 0.9  # of what is known, by each check
POOL_WEIGHT = 3.0  # checks of its own after which a request counts as much as those before it
POOL_STALE_CHECKS = 16  # of others, after which a request's marginals are computed again
FIRST_RATE, FIRST_WEIGHT = 0.5, 2.0


class _Rates:
    """Drafts that were reached, and that stood, by place; older checks count less."""

    __slots__ = ("marginals", "num_pooled", "reached", "stood")

    def __init__(self, num_places: int) -> None:
        self.reached = [0.0] * num_places
        self.stood = [0.0] * num_places
        self.marginals: list[float] | None = None
        self.num_pooled = 0  # checks of all requests when the marginals were computed

    def observe(self, num_drafts: int, num_accepted: int, decay: float) -> None:
        for place in range(min(num_drafts, num_accepted + 1)):
            stands = place < num_accepted
            self.reached[place] = decay * self.reached[place] + 1
            self.stood[place] = decay * self.stood[place] + stands
        self.marginals = None


class Acceptance:
    """See above. `max_draft_tokens`: the last place."""

    def __init__(self, max_draft_tokens: int) -> None:
        self._pool = _Rates(max_draft_tokens)
        self._requests: dict[Hashable, _Rates] = {}
        self._max_draft_tokens = max_draft_tokens
        self._num_pooled = 0
        self._pool_rates: list[float] | None = None  # of `_pool`, until the next check

    def observe(self, request: Hashable, num_drafts: int, num_accepted: int) -> None:
        """Learn from drafts of a request, of which the first `num_accepted` were the tokens that came."""
        self._of(request).observe(num_drafts, num_accepted, REQUEST_DECAY)
        self._pool.observe(num_drafts, num_accepted, POOL_DECAY)
        self._pool_rates = None
        self._num_pooled += 1

    def forget(self, request: Hashable) -> None:
        """The request has ended."""
        self._requests.pop(request, None)

    def marginals(self, request: Hashable) -> list[float]:
        """Return for each place the probability that its draft stands. Never increasing."""
        rates = self._of(request)
        if rates.marginals is None or self._num_pooled - rates.num_pooled >= POOL_STALE_CHECKS:
            rates.marginals, rates.num_pooled = self._marginals(rates), self._num_pooled
        return rates.marginals

    def _of(self, request: Hashable) -> _Rates:
        rates = self._requests.get(request)
        if rates is None:
            rates = self._requests[request] = _Rates(self._max_draft_tokens)
        return rates

    def _marginals(self, rates: _Rates) -> list[float]:
        if self._pool_rates is None:
            self._pool_rates = self._rates_of_pool()
        marginal, marginals = 1.0, []
        for stood, reached, pool_rate in zip(rates.stood, rates.reached, self._pool_rates, strict=True):
            marginal *= (stood + POOL_WEIGHT * pool_rate) / (reached + POOL_WEIGHT)
            marginals.append(marginal)
        return marginals

    def _rates_of_pool(self) -> list[float]:
        """That a draft of each place stands if those before it do, in any request."""
        rate, rates = FIRST_RATE, []
        for stood, reached in zip(self._pool.stood, self._pool.reached, strict=True):
            # A place that was hardly reached is taken to be like the one before it.
            rate = (stood + FIRST_WEIGHT * rate) / (reached + FIRST_WEIGHT)
            rates.append(rate)
        return rates
