"""A decision as a table for people: what each replica would cost, by what takes the time, and why one is picked."""

from __future__ import annotations

from millstream_gateway.candidate import Candidate
from millstream_gateway.pick import NEARLY_EQUAL_SECONDS, NEARLY_EQUAL_SHARE, Pick, PickReason, Policy
from millstream_gateway.picker_beliefs import PickerBeliefs
from millstream_gateway.routed_request import RoutedRequest

NEARLY = f"within {NEARLY_EQUAL_SHARE:.0%} or {NEARLY_EQUAL_SECONDS * 1e3:.0f} ms of the cheapest"
SENTENCES = {
    PickReason.PREFIX: f"it costs {NEARLY}, and is believed to hold more of the prompt than the others that do.",
    PickReason.HASH: f"it is the first by rendezvous hash of those that hold as much and cost as little ({NEARLY}).",
    PickReason.COST: f"no other is {NEARLY}.",
    PickReason.MOST_FREE_KV: "it has the most free KV cache after this request.",
    PickReason.LEAST_REQUESTS: "it has the fewest requests.",
    PickReason.ROUND_ROBIN: "its turn has come.",
    PickReason.ONLY_REPLICA: "it is the only replica that serves.",
}
HEADER = ("", "replica", "TTFT ms", "prefill", "KV wait", "decodes", "cached", "uncached", "queued", "free KV", "hash")


def explain(request: RoutedRequest, picked: Pick, beliefs: PickerBeliefs, policy: Policy) -> str:
    """Return the table and the reason, without a line break at the end."""
    ratio = beliefs.ratio.bytes_per_token
    lines = [
        f"{request.model}: about {beliefs.prompt_tokens(request):,.0f} tokens of prompt "
        f"({request.text_bytes:,} bytes, {ratio:.2f} a token), policy {policy}",
        "",
    ]
    if not picked.ranked:
        return "\n".join([*lines, "No replica serves: the request would be answered with 503."])
    rows = [HEADER, *(_row(place, candidate) for place, candidate in enumerate(picked.ranked, 1))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += [_line(row, widths) for row in rows]
    first = picked.ranked[0]
    lines += ["", f"Picked {first.replica.endpoint}: {SENTENCES[picked.reason]}"]
    if any(candidate.is_guess for candidate in picked.ranked):
        lines.append(
            "* guessed: no replica is believed to hold the turn before, and pickers send what they do not know there."
        )
    if any(candidate.replica.report is None for candidate in picked.ranked):
        lines.append("? has not reported: assumed to be idle.")
    return "\n".join(lines)


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    place, replica, *numbers = (f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
    return "  ".join([place, replica.strip().ljust(widths[1]), *numbers]).rstrip()


def _row(place: int, candidate: Candidate) -> tuple[str, ...]:
    cost, replica = candidate.cost, candidate.replica
    seconds = (cost.seconds, cost.prefill_seconds, cost.kv_wait_seconds, cost.decode_seconds)
    return (
        str(place),
        replica.endpoint,
        *(f"{1e3 * value:,.1f}" for value in seconds),
        f"{cost.cached_tokens:,.0f}{'*' if candidate.is_guess else ''}",
        f"{cost.uncached_tokens:,.0f}",
        f"{cost.backlog_tokens:,.0f}",
        f"{max(0.0, cost.free_tokens):,.0f}" if replica.report is not None else "?",
        f"{candidate.rendezvous_score / 2**64:.2f}",
    )
