"""What was attacked and held, each with the tests that try it again: `file::function`, beneath the repository.

The first test of a row is the attack as it was made; the others hold its neighbours. `SECURITY.md` names each row.
"""

from __future__ import annotations

HTTP, SOURCES, OPERATOR = "tests/unit/server/http", "tests/unit/sources", "tests/unit/operator"
TEMPLATES = "tests/unit/tokenizing"

HELD: dict[str, tuple[str, ...]] = {
    "foreign ServiceAccounts": (
        "tests/security/test_pod_fields.py::test_what_a_pod_must_not_have_is_refused_in_a_file",
        "tests/security/test_pod_fields.py::test_what_a_pod_must_not_have_reaches_no_pod_of_a_stored_object",
        f"{OPERATOR}/rendering/test_pod.py::test_the_pod_can_write_to_tmp_alone_and_holds_no_token",
    ),
    "host paths": (
        "tests/security/test_pod_fields.py::test_what_a_pod_must_not_have_is_refused_in_a_file",
        "tests/security/test_pod_fields.py::test_a_path_that_leaves_its_folder_is_refused",
        f"{OPERATOR}/rendering/test_pod.py::test_the_pod_meets_the_restricted_profile",
    ),
    "status writes": (
        "tests/security/test_status_writes.py::test_a_forged_status_changes_no_pod_and_is_written_over",
        "tests/security/test_status_writes.py::test_the_status_is_a_subresource_that_the_chart_gives_to_the_operator_alone",
    ),
    "raw HTTP": (
        "tests/security/test_raw_http.py::test_a_request_that_is_none_is_refused",
        "tests/security/test_raw_http.py::test_a_request_in_the_body_of_another_is_not_answered",
        f"{HTTP}/test_protocol.py::test_what_never_ends_is_cut_off",
        f"{HTTP}/test_protocol.py::test_a_transfer_coding_that_would_not_be_decoded_is_refused_by_name",
        f"{HTTP}/test_bad_requests.py::test_a_broken_body_is_refused",
        f"{HTTP}/test_half_close.py::test_garbage_behind_requests_is_answered_behind_them",
    ),
    "slow connections": (
        f"{HTTP}/test_connection_cap.py::test_many_idle_connections_give_way_to_a_new_one_and_running_answers_do_not",
        f"{HTTP}/test_silent_clients.py::test_a_request_that_does_not_come_is_a_408",
        f"{HTTP}/test_silent_clients.py::test_answers_that_nobody_reads_hold_no_place",
        f"{HTTP}/test_large_bodies.py::test_half_sent_bodies_hold_bounded_memory_and_no_small_request_up",
        "tests/unit/server/test_hostile_clients.py::test_hostile_clients_leave_nothing_behind_and_others_are_served",
    ),
    "hostile parameters": (
        f"{HTTP}/test_bad_requests.py::test_a_bad_parameter_is_named",
        f"{HTTP}/test_untrusted_input.py::test_every_parameter_has_a_bound",
        "tests/unit/server/openai/test_fuzz.py::test_no_request_is_answered_with_a_5xx",
    ),
    "archives": (
        f"{SOURCES}/test_fetch_image.py::test_an_archive_that_would_lead_out_is_refused",
        f"{SOURCES}/test_fetch_image.py::test_an_artifacts_file_name_that_leads_out_is_refused",
        f"{SOURCES}/test_fetch_image.py::test_bombs_are_refused",
        f"{SOURCES}/test_fetch_image.py::test_a_damaged_archive",
        f"{SOURCES}/test_fetch_image.py::test_an_archive_cut_inside_a_file_is_noticed",
        f"{SOURCES}/test_fetch_image.py::test_a_manifest_that_is_not_the_one_asked_for",
    ),
    "chat templates": (
        f"{TEMPLATES}/test_hostile_templates.py::test_what_cannot_be_stopped_or_grows_unseen_is_refused_before_it_runs",
        f"{TEMPLATES}/test_template_limits.py::test_what_would_take_the_memory_is_refused_with_the_limit",
        f"{TEMPLATES}/test_template_limits.py::test_what_computes_without_end_is_stopped",
        f"{TEMPLATES}/test_template_limits.py::test_what_has_endless_paths_is_refused",
        f"{TEMPLATES}/test_tokenizer.py::"
        "test_a_template_cannot_leave_the_sandbox_and_the_error_tells_nothing_of_the_inside",
        f"{HTTP}/test_untrusted_input.py::"
        "test_a_template_that_computes_without_end_is_a_400_and_others_are_served_meanwhile",
    ),
    "config.json": (
        f"{OPERATOR}/catalog/test_config_mistakes.py::"
        "test_a_value_that_would_pass_unnoticed_is_refused_by_field_value_and_cure",
        f"{OPERATOR}/catalog/test_config_mistakes.py::test_what_python_reads_as_json_and_nothing_else_does_is_refused",
        f"{OPERATOR}/catalog/test_config_mistakes.py::test_no_mistake_gives_a_traceback_or_a_plan_without_bytes",
        f"{SOURCES}/test_inspect.py::test_a_damaged_folder_is_named",
        f"{SOURCES}/test_inspect.py::test_a_header_of_other_types_or_of_huge_numbers_is_one_short_sentence",
    ),
    "shares of keys": (
        "tests/security/test_shares_of_keys.py::test_a_key_that_floods_the_server_keeps_no_other_key_out",
        "tests/unit/engine/scheduling/test_fair_queue.py::"
        "test_a_flood_delays_no_other_client_beyond_three_times_a_quarter_of_the_machine",
        "tests/unit/engine/scheduling/test_fair_queue.py::test_a_client_with_one_slow_answer_collects_no_credit",
        "tests/unit/engine/scheduling/test_fair_queue.py::"
        "test_a_client_that_cancels_what_is_computed_has_used_its_turn",
    ),
    "cache between keys": (
        "tests/security/test_cache_between_keys.py::test_no_salt_makes_one_key_meet_what_another_has_sent",
        f"{HTTP}/test_api_keys.py::test_only_holders_of_a_key_get_in_probes_excepted",
        "tests/unit/engine/scheduling/test_prefix_cache.py::"
        "test_salts_keep_tenants_apart_and_the_chain_tells_positions_apart",
    ),
    "redirects": (
        f"{SOURCES}/test_fetch_hub.py::test_a_redirect_to_something_else_is_not_followed",
        f"{SOURCES}/test_fetch_hub.py::test_tokens",
        f"{OPERATOR}/probing/test_service_probe.py::test_a_redirect_is_not_followed",
    ),
    "pods that lie": (
        f"{OPERATOR}/probing/test_pod_traffic.py::"
        "test_a_pod_of_others_and_one_of_another_configuration_are_not_believed",
        f"{OPERATOR}/probing/test_service_probe.py::test_an_endless_answer_is_cut_off",
        f"{OPERATOR}/probing/test_service_probe.py::test_an_answer_that_trickles_ends_with_the_time_limit",
    ),
    "closed addresses": (
        f"{SOURCES}/test_closed_addresses.py::test_a_redirect_leads_nowhere_else_and_the_status_there_is_not_shown",
        f"{SOURCES}/test_closed_addresses.py::test_this_machine_is_not_asked_however_it_is_spelled",
        f"{SOURCES}/test_closed_addresses.py::test_a_metadata_service_is_not_asked",
        f"{SOURCES}/test_closed_addresses.py::test_the_connection_is_to_the_address_that_was_checked",
        f"{SOURCES}/test_closed_addresses.py::test_a_proxy_resolves_names_and_is_asked_for_no_closed_address",
    ),
    "a login for another": (
        f"{SOURCES}/test_closed_addresses.py::test_a_login_goes_to_no_token_server_that_a_challenge_alone_names",
        f"{SOURCES}/test_closed_addresses.py::test_where_a_login_may_go",
    ),
    "the operator's token": (
        "tests/soak/test_admission_policies.py::test_200_random_objects_outside_the_rules_are_refused",
        "tests/soak/test_admission_policies.py::test_a_template_passes_where_kubernetes_own_check_of_restricted_passes",
        "tests/soak/test_admission_policies.py::test_an_orphan_is_adopted_and_what_only_looks_like_one_is_not",
        "tests/unit/chart/test_admission_policies.py::test_the_policies_judge_the_operators_user_alone",
    ),
    "another object's inspection": (
        f"{OPERATOR}/facts/test_shared_inspections.py::test_the_answer_of_a_hub_that_another_object_chose_is_not_taken",
        f"{OPERATOR}/facts/test_shared_inspections.py"
        "::test_each_way_to_a_model_has_its_own_key_of_sharing_and_the_record_has_the_same",
    ),
    "a deleted object that serves on": (
        f"{OPERATOR}/reconciling/test_deleted_owner.py::test_its_deployment_is_scaled_to_zero_once_and_its_pods_end",
        "tests/soak/test_sample.py::test_what_is_deleted_stops_serving_without_a_garbage_collector",
        "e2e/test_deleted_stops_serving.py::"
        "test_it_stops_serving_while_the_collector_is_held_back_and_a_successor_serves_afterwards",
    ),
}
