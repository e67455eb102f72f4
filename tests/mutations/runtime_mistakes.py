"""Mistakes in the runtime and in what starts its kernels, beyond those against its promises."""

from __future__ import annotations

from tests.mutations.mutation import KERNELS, RUNTIME, Mutation

ENGINE = [
    Mutation.of(
        "a whole prompt in the cache needs no computation",
        f"{RUNTIME}/engine/scheduling/block_manager.py",
        "return hashes[: (len(sequence.token_ids) - 1) // self.block_size_tokens]",
        "return hashes[: len(sequence.token_ids) // self.block_size_tokens]",
        "engine/scheduling/test_prefix_cache.py::test_a_whole_prompt_in_the_cache_still_computes_one_token",
    ),
    Mutation.of(
        "the first token of a window is behind it",
        f"{RUNTIME}/engine/scheduling/block_manager.py",
        "first_seen = num_tokens - max(self.window_tokens, LEAST_WINDOW_TOKENS) + 1",
        "first_seen = num_tokens - max(self.window_tokens, LEAST_WINDOW_TOKENS) + 2",
        "engine/scheduling/test_windowed_prefix.py::test_a_hit_holds_only_what_the_window_reaches",
        "engine/scheduling/test_prefix_cache.py::test_a_window_gives_back_what_it_passed",
    ),
    Mutation.of(
        "the newest cached block is evicted first",
        f"{RUNTIME}/engine/scheduling/block_pool.py",
        "for block in list(islice(self.evictable, max(0, count))):",
        "for block in list(islice(reversed(self.evictable), max(0, count))):",
        "engine/scheduling/test_eviction.py::test_the_next_turn_makes_a_conversation_the_newest",
        "engine/scheduling/test_prefix_cache.py"
        "::test_the_longest_unused_prefix_goes_first_and_its_tail_before_its_head",
    ),
    Mutation.of(
        "of running requests the most urgent is preempted",
        f"{RUNTIME}/engine/scheduling/step_plan.py",
        "key=lambda one: (-one.request.priority, one.num_computed_tokens, -one.order)",
        "key=lambda one: (one.request.priority, one.num_computed_tokens, -one.order)",
        "engine/scheduling/test_scheduler.py::test_the_least_urgent_is_preempted_first",
    ),
    Mutation.of(
        "a long prompt waits for all shorter ones",
        f"{RUNTIME}/engine/scheduling/waiting_order.py",
        "return min(num_tokens // TOKENS_PER_ARRIVAL, MOST_DELAY_ARRIVALS)",
        "return num_tokens // TOKENS_PER_ARRIVAL",
        "engine/scheduling/test_waiting_order.py"
        "::test_longer_prompts_wait_longer_up_to_a_bound_below_a_step_of_priority",
    ),
    Mutation.of(
        "the repetition penalty divides every logit",
        f"{RUNTIME}/engine/sampling/logits_processors.py",
        "picked = torch.where(picked > 0, picked / repetition, picked * repetition)",
        "picked = picked / repetition",
        "engine/sampling/test_sampler.py::test_penalties_follow_openais_and_ctrls_formulas",
    ),
    Mutation.of(
        "a redraw of a nucleus is not looked at again",
        f"{RUNTIME}/engine/sampling/draw_on_host.py",
        "        if _surely_stands(weights.item(token), total, limit):\n            break\n",
        "        break\n",
        "engine/sampling/test_draw.py::test_tokens_come_up_as_often_as_a_sorted_vocabulary_says",
        "engine/sampling/test_draw.py::test_a_draw_from_a_nucleus_is_repeated_above_what_came_up",
        "engine/sampling/test_sampler.py::test_top_k_and_top_p_keep_the_right_tokens",
    ),
    Mutation.of(
        "the token that takes a fallen draft's place is drawn from the target",
        f"{RUNTIME}/engine/sampling/rejection.py",
        "    left[: len(drawn_from)] -= drawn_from\n",
        "",
        "engine/speculation/test_distribution.py::test_both_tokens_are_distributed_as_the_target_draws_them",
    ),
    Mutation.of(
        "of runs of one length the earliest is continued",
        f"{RUNTIME}/engine/speculation/repeated_runs.py",
        "            if num_tokens > found.num_tokens:\n",
        "            if num_tokens >= found.num_tokens:\n",
        "engine/speculation/test_repeated_runs.py::test_the_longest_run_and_its_latest_place",
    ),
    Mutation.of(
        "an answer ends at the token behind its limit",
        f"{RUNTIME}/engine/ending.py",
        "return num_generated >= sequence.request.sampling.max_tokens or num_tokens >= self.max_model_len",
        "return num_generated >= sequence.request.sampling.max_tokens or num_tokens > self.max_model_len",
        "engine/test_engine.py::test_length_ends_at_max_tokens_and_at_the_context",
    ),
    Mutation.of(
        "in a container the largest step and the pool take turns",
        f"{RUNTIME}/engine/kv/pool_size.py",
        "return activations_bytes + limit_bytes * CPU_MARGIN_PERCENT // 100",
        "return max(activations_bytes, limit_bytes * CPU_MARGIN_PERCENT // 100)",
        "engine/test_host_limits.py::test_in_a_container_the_pool_takes_what_the_largest_step_and_a_margin_leave",
    ),
]

MODELS = [
    Mutation.of(
        "each rank has the KV head of its own number",
        f"{RUNTIME}/models/linear/shares.py",
        "head = ranks.rank * num_kv_heads // ranks.size",
        "head = ranks.rank % num_kv_heads",
        "models/linear/test_tensor_parallel.py::test_key_value_heads_stay_with_their_queries",
    ),
    Mutation.of(
        "the shares of chosen experts always sum to one",
        f"{RUNTIME}/models/layers/moe.py",
        "return shares / shares.sum(dim=-1, keepdim=True) if self.normalise else shares, experts",
        "return shares / shares.sum(dim=-1, keepdim=True), experts",
        "models/families/test_families.py::test_logits_equal_transformers_in_float64_and_every_field_counts",
    ),
    Mutation.of(
        "zero points of GPTQ's first version wrap at 15 in any number of bits",
        f"{RUNTIME}/quantization/gptq.py",
        "unpacked_zeros = (unpacked_zeros + 1) & ((1 << self.bits) - 1)",
        "unpacked_zeros = (unpacked_zeros + 1) & 0xF",
        "quantization/test_formats.py::test_a_format_computes_what_its_dequantized_weights_compute",
    ),
    Mutation.of(
        "a limit that a figure just keeps is broken",
        f"{RUNTIME}/quality/verdict.py",
        'return not value <= limit if kind == "max" else not value >= limit',
        'return value > limit if kind == "max" else value < limit',
        "quality/test_verdict.py::test_a_figure_that_is_no_number_fails",
    ),
    Mutation.of(
        "zero points are stored as they are (GPTQ's second version)",
        f"{RUNTIME}/quantize/output/packing.py",
        "stored_zeros = (codes.zeros.to(torch.int32) - 1) & ((1 << BITS) - 1)",
        "stored_zeros = codes.zeros.to(torch.int32) & ((1 << BITS) - 1)",
        "quantize/test_packed_words.py::test_gptq_packs_inputs_in_their_order_and_zero_points_minus_one",
    ),
    Mutation.of(
        "an error of GPTQ is added to the inputs behind it",
        f"{RUNTIME}/quantize/methods/gptq_solve.py",
        "block[index:].addr_(factor[index, index : len(block)], error, alpha=-1)",
        "block[index:].addr_(factor[index, index : len(block)], error)",
        "quantize/test_methods.py::test_gptq_loses_less_than_rounding",
    ),
    Mutation.of(
        "a number of JSON that Python reads is one",
        f"{RUNTIME}/strict_json.py",
        "return None if math.isfinite(value) else (path, value)",
        "return None if not math.isnan(value) else (path, value)",
        "sources/test_inspect.py::test_a_damaged_folder_is_named",
    ),
]

SERVER = [
    Mutation.of(
        "the third crash within the window is the last",
        f"{RUNTIME}/server/engine/restart_policy.py",
        "return delays[len(recent) - 1] if len(recent) <= len(delays) else None",
        "return delays[len(recent) - 1] if len(recent) < len(delays) else None",
        "server/engine/test_restart_policy.py"
        "::test_the_first_restart_is_at_once_and_each_next_one_later_until_it_gives_up",
    ),
    Mutation.of(
        "a request gives a silent engine its time again",
        f"{RUNTIME}/server/engine/watchdog.py",
        "self.since_seconds = now_seconds if self.since_seconds is None else min(self.since_seconds, now_seconds)",
        "self.since_seconds = now_seconds",
        "server/engine/test_watchdog.py::test_clients_that_try_again_do_not_make_a_dead_engine_look_alive",
    ),
    Mutation.of(
        "a chunked body has no length to compare with the cap",
        f"{RUNTIME}/server/http/middleware.py",
        '        received_bytes += len(message.get("body", b""))\n',
        '        received_bytes = len(message.get("body", b""))\n',
        "server/http/test_bad_requests.py::test_a_broken_body_is_refused",
    ),
    Mutation.of(
        "each choice of a seeded request has the request's seed",
        f"{RUNTIME}/server/openai/generation.py",
        "return replace(params, seed=params.seed + candidate)",
        "return replace(params, seed=params.seed)",
        "server/openai/test_sampling_api.py::test_n_seeded_choices_differ_and_repeat_and_the_first_is_the_single_one",
    ),
    Mutation.of(
        "the operator's probe may ask for any number of tokens",
        f"{RUNTIME}/server/openai/probe_limits.py",
        "        and body.max_tokens == 1\n",
        "",
        "server/http/test_api_keys.py::test_the_key_of_the_probe_opens_probes_and_nothing_else",
    ),
    Mutation.of(
        "a character is whole at its third token",
        f"{RUNTIME}/tokenizing/detokenizer.py",
        "MAX_TOKENS_HELD_BACK = 4",
        "MAX_TOKENS_HELD_BACK = 3",
        "tokenizing/test_detokenizer.py::test_text_in_any_script_survives_byte_by_byte",
        "tokenizing/test_detokenizer.py::test_byte_fallback_of_sentencepiece_models_survives_too",
    ),
    Mutation.of(
        "NVLink joins all GPUs where each has it to the next",
        f"{RUNTIME}/distributed/nvlink.py",
        "for other in devices[index + 1 :]:",
        "for other in devices[index + 1 : index + 2]:",
        "distributed/test_topology.py::test_nvlink_must_join_every_pair",
    ),
    Mutation.of(
        "a path that climbs out and comes back is within its folder",
        f"{RUNTIME}/sources/selection.py",
        'if bad or any(part == ".." or len(part.encode(errors="replace")) > 255 for part in path.parts):',
        'if bad or path.parts[0] == ".." or any(len(part.encode(errors="replace")) > 255 for part in path.parts):',
        "sources/test_fetch_image.py::test_an_archive_that_would_lead_out_is_refused",
    ),
    Mutation.of(
        "a file that is refused may stay among the partials: it is not part of a model",
        f"{RUNTIME}/sources/fetch.py",
        "            self._folder.discard(path)\n            raise\n",
        "            raise\n",
        "tests/security/test_support_files.py::test_a_hub_that_sends_a_library_leaves_nothing_in_the_folder",
    ),
    Mutation.of(
        "a file whose first line is a token of tiktoken is tiktoken's",
        f"{RUNTIME}/sources/support_files.py",
        "        return all(TIKTOKEN_LINE",
        "        return any(TIKTOKEN_LINE",
        "tests/security/test_support_files.py::test_a_protobuf_that_is_no_sentencepiece_model_is_refused",
    ),
    Mutation.of(
        "no folder of the user is on the path of an isolated child",
        f"{RUNTIME}/processes/interpreter.py",
        'ISOLATED = ("-I", "-B", "-u")',
        'ISOLATED = ("-s", "-B", "-u")',
        "tests/security/test_environment.py::test_a_child_of_an_isolated_process_is_isolated_and_imports_the_same_code",
    ),
    Mutation.of(
        "settings of OpenSSL that a pod has are the pod's own",
        "hack/images/interpreter/millstream.pth",
        'os.environ["OPENSSL_CONF"] = "/dev/null"',
        'os.environ.setdefault("OPENSSL_CONF", "/dev/null")',
        "tests/security/test_environment.py::test_openssl_reads_no_settings_of_an_environment",
    ),
    Mutation.of(
        "a template may change the values that it is given: they belong to its own request",
        f"{RUNTIME}/tokenizing/template_environment.py",
        "class TemplateEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):",
        "class TemplateEnvironment(jinja2.sandbox.SandboxedEnvironment):",
        "server/openai/test_template_kwargs.py::test_values_of_a_client_do_not_lead_out_of_the_sandbox",
    ),
    Mutation.of(
        "a metric has the prefix of this project",
        f"{RUNTIME}/server/operations/metrics.py",
        'name: self._histogram(f"vllm:{name}", text, buckets)',
        'name: self._histogram(f"millstream:{name}", text, buckets)',
        "server/operations/test_vllm_metrics.py::test_every_metric_of_vllm_is_exported_or_an_exception",
    ),
]

SECURITY = [
    Mutation.of(
        "an address is shown without its user and password",
        f"{RUNTIME}/sources/hugging_face.py",
        "DEFAULT_ENDPOINT if endpoint == DEFAULT_ENDPOINT else OTHER_HUB",
        'endpoint.rpartition("@")[2]',
        "sources/test_addresses.py::test_the_default_hub_is_shown_and_another_is_not",
    ),
    Mutation.of(
        "all servers of a download are the one that was asked first",
        f"{RUNTIME}/sources/addresses.py",
        "is_here = origin(url) == origin(self.url)",
        "is_here = bool(origin(url))",
        "sources/test_addresses.py::test_another_server_is_named_by_who_redirects_to_it",
    ),
    Mutation.of(
        "a panic is an Exception by itself",
        f"{RUNTIME}/rust_panics.py",
        "if error is not None and is_panic(error):",
        "if isinstance(error, Exception) and is_panic(error):",
        "runtime/test_rust_panics.py::test_a_panic_becomes_an_exception_that_does_not_quote_it",
    ),
    Mutation.of(
        "whatever is no Exception is a panic",
        f"{RUNTIME}/rust_panics.py",
        "return kind.__name__ == PANIC_NAME and kind.__module__ == PANIC_MODULE",
        "return not issubclass(kind, Exception)",
        "runtime/test_rust_panics.py::test_what_is_no_panic_passes",
    ),
    Mutation.of(
        "a text that the probes do not make grow does not grow",
        f"{RUNTIME}/tokenizing/text_growth.py",
        "if not self._normalizers or width_bytes * len(text) * self._bound <= MAX_NORMALIZED_BYTES:",
        "if not self._normalizers or width_bytes * len(text) * MAX_GROWTH <= MAX_NORMALIZED_BYTES:",
        "tokenizing/test_text_growth.py::test_a_pattern_that_no_probe_has_is_measured_where_a_text_has_it",
    ),
    Mutation.of(
        "a pattern matches one character at least",
        f"{RUNTIME}/tokenizing/text_growth.py",
        "    return 1.0 + 2 * content_bytes\n",
        "    return max(1.0, content_bytes)\n",
        "tokenizing/test_text_growth.py::test_no_character_grows_beyond_the_bound_of_a_step",
    ),
]

KERNEL_STARTS = [
    Mutation.of(
        "the layers of a step differ in their pools alone",
        f"{KERNELS}/cpu/decode.py",
        "key = (layer, query.shape, pool.shape, query.dtype, pool.dtype, pool.stride())",
        "key = (query.shape, pool.shape, query.dtype, pool.dtype, pool.stride())",
        "engine/attention/test_compiled_decodes.py::test_torch_decodes_to_the_same_tokens_in_every_way",
        "engine/attention/test_compiled_decodes.py::test_every_family_has_the_same_tokens_by_either",
    ),
    Mutation.of(
        "a table of blocks may be as long as it was when the row was shorter",
        f"{KERNELS}/cpu/pools.py",
        'require(found == wanted, "tables", f"have {found} blocks, and the tokens of their rows fill {wanted}")',
        'require(found <= wanted, "tables", f"have {found} blocks, and the tokens of their rows fill {wanted}")',
        "kernels/test_cpu_decode.py::test_no_memory_outside_the_pool_is_read",
    ),
    Mutation.of(
        "rows that fill a class belong to the next one",
        f"{KERNELS}/tuning/table.py",
        "if most_rows is None or num_rows <= most_rows:",
        "if most_rows is None or num_rows < most_rows:",
        "kernels/test_tuning.py::test_rows_have_the_choice_of_the_first_class_with_room",
    ),
    Mutation.of(
        "code for sm_90 serves every later GPU",
        f"{KERNELS}/prebuilt/key.py",
        "return HOPPER if capability == HOPPER else None",
        "return HOPPER if capability >= HOPPER else None",
        "kernels/test_prebuilt.py::test_code_for_sm_80_serves_8_x_and_that_for_sm_90_its_own_gpu_alone",
    ),
]

MISTAKES = [*ENGINE, *MODELS, *SERVER, *SECURITY, *KERNEL_STARTS]
