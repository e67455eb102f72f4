"""Mistakes in the gateway's decision."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

GATEWAY = "gateway/millstream_gateway"

MISTAKES = [
    Mutation.of(
        "the place of a conversation is the hash of its whole prompt",
        f"{GATEWAY}/routed_request.py",
        "hmac.digest(key, prompt.start,",
        "hmac.digest(key, prompt.text,",
        "gateway/test_prefix_chunks.py::test_a_conversation_grows_at_its_end_and_keeps_its_place",
    ),
    Mutation.of(
        "a prefix is a prefix, whoever's key it came with",
        f"{GATEWAY}/prefix_chunks.py",
        'return hmac.digest(api_key.encode("utf-8", "surrogatepass"), parts, "sha256")',
        'return hmac.digest(b"", parts, "sha256")',
        "gateway/test_prefix_chunks.py::test_what_a_replica_does_not_share_shares_no_chunk",
    ),
    Mutation.of(
        "parts of a scope may be joined as they are",
        f"{GATEWAY}/prefix_chunks.py",
        'f"{len(part)}:{part}"',
        'f"{part}"',
        "gateway/test_prefix_chunks.py::test_the_scope_is_the_hmac_of_the_api_key",
    ),
    Mutation.of(
        "an LRU touches a prompt from its first chunk to its last",
        f"{GATEWAY}/believed_cache.py",
        "for chunk in reversed(chunks):",
        "for chunk in chunks:",
        "gateway/test_believed_cache.py::test_it_holds_what_the_definition_holds",
        "gateway/test_believed_cache.py::test_a_smaller_capacity_evicts_the_oldest_and_of_it_the_end",
    ),
    Mutation.of(
        "a replica that starts anew keeps its name, so what it holds",
        f"{GATEWAY}/picker_beliefs.py",
        'if beliefs.boot_id not in ("", report.boot_id):',
        'if beliefs.boot_id == "":',
        "gateway/test_picker_beliefs.py::test_a_new_boot_id_clears_all_and_the_same_one_nothing",
    ),
    Mutation.of(
        "what was sent counts when a report says so",
        f"{GATEWAY}/cost.py",
        "+ decision.uncached_tokens",
        "+ 0.0",
        "gateway/test_cost.py::test_what_was_sent_since_the_report_queues_without_what_is_cached",
    ),
    Mutation.of(
        "a queue that was reported is still there",
        f"{GATEWAY}/cost.py",
        "max(0.0, tokens - rate * max(0.0, now_seconds - seconds))",
        "max(0.0, tokens)",
        "gateway/test_cost.py::test_the_reported_queue_shrinks_at_the_prefill_rate_until_now",
    ),
    Mutation.of(
        "the holder of a prefix is always the right replica",
        f"{GATEWAY}/pick.py",
        "near = [one for one in candidates if one.cost.seconds <= limit_seconds]",
        "near = candidates",
        "gateway/test_pick.py::test_the_holder_of_the_prefix_is_picked_until_its_queue_costs_more_than_computing_it",
    ),
    Mutation.of(
        "the cheapest replica is the best, however small the difference",
        f"{GATEWAY}/pick.py",
        "max(NEARLY_EQUAL_SHARE * cheapest_seconds, NEARLY_EQUAL_SECONDS)",
        "0.0",
        "gateway/test_pick.py::test_a_replica_that_is_10_percent_or_50_ms_dearer_is_nearly_equal_and_no_other",
    ),
    Mutation.of(
        "a turn that this picker has not seen is a new conversation",
        f"{GATEWAY}/candidate.py",
        "if guess_tokens > tokens[home]:",
        "if guess_tokens < tokens[home]:",
        "gateway/test_pick.py::test_the_turn_before_is_guessed_to_be_where_every_picker_sends_what_it_does_not_know",
        "benchmarks/test_gateway_simulator.py::test_a_conversation_stays_on_its_replica_also_with_three_pickers",
    ),
]
