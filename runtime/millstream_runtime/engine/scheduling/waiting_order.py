"""In which order the prompts of one client wait for their first step: aged shortest-prompt-first.

    order = arrival + 64 × priority + delay(tokens to compute)

The lowest number comes first. Shortest-first has the least mean wait of all orders (Smith 1956, "Various optimizers for
single-stage production"), and alone it starves long prompts. So the delay is counted in arrivals: a prompt lets at most
as many later ones pass, whatever comes, and each newcomer behind them comes behind it. The same cure, for orders by the
expected length of answers, is in Fu et al. 2024 (arXiv 2408.15792).

    arrivals     0 (long)  1 (short)  2 (short)  3 (short)  4 (short)
    order        3         1          2          3          4             with a delay of 3 for the long one
    first step   1, 2, 0, 3, 4                                            equal orders: the first to arrive is first

Room in the pool is given in this order, so the bound is one of room. Of a step, short prompts have their half even
while long ones wait (`prompt_budget`): while a long prompt is computed, any number of short ones may pass the next long
one, which begins as soon as that one is done.

A priority is a head start counted in arrivals too, and one step of it is worth more than the longest delay. So a prompt
is never behind a less urgent one that came with it or later, however long it is. Pure: no torch, no clock.
"""

from __future__ import annotations

PRIORITY_STRIDE_ARRIVALS = 64
TOKENS_PER_ARRIVAL = 8
MOST_DELAY_ARRIVALS = 63


def queue_order(arrival: int, priority: int, num_tokens: int) -> int:
    """Return the place of a prompt among those that wait. `num_tokens`: that it computes, so without cached ones."""
    return arrival + PRIORITY_STRIDE_ARRIVALS * priority + delay_arrivals(num_tokens)


def delay_arrivals(num_tokens: int) -> int:
    """Return how many later prompts may be given room before one that computes `num_tokens`, at most."""
    return min(num_tokens // TOKENS_PER_ARRIVAL, MOST_DELAY_ARRIVALS)
