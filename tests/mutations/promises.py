"""A mistake against each promise of the README, in the file that keeps it. The first test is the promise's own."""

from __future__ import annotations

from tests.mutations.mutation import COMMAND_LINE, OPERATOR, RUNTIME, Mutation

OPERATED = [
    Mutation.of(
        "a model whose pods are all available answers soon",
        f"{OPERATOR}/status/readiness.py",
        "    if observation.answer.failure is not None:\n",
        "    if observation.answer.failure is not None and not observation.rolled_out:\n",
        "operator/reconciling/test_ready.py::test_pods_alone_are_not_ready",
    ),
    Mutation.of(
        "the first failing pod speaks for all of them",
        f"{OPERATOR}/diagnosis/pod_failures.py",
        "return min(found, key=lambda one: (ORDER.index(one.reason), one.message), default=None)",
        "return next(iter(found), None)",
        "operator/diagnosis/test_diagnosis.py::test_the_most_useful_diagnosis_stands_for_all_pods",
    ),
    Mutation.of(
        "who says nothing about updates follows the operator",
        f"{OPERATOR}/rollout/pinning.py",
        "return owner.spec.runtime is not None and owner.spec.runtime.update_policy is UpdatePolicy.FOLLOW_OPERATOR",
        "return owner.spec.runtime is None or owner.spec.runtime.update_policy is UpdatePolicy.FOLLOW_OPERATOR",
        "operator/reconciling/test_reconciler.py::test_another_default_image_restarts_nothing_until_the_spec_changes",
    ),
    Mutation.of(
        "a child whose digest is the last one applied needs no look at its fields",
        f"{OPERATOR}/kube/diff.py",
        "        if matches(live, wanted):\n            return False\n",
        '        if live["metadata"].get("annotations", {}).get(APPLIED_ANNOTATION) == '
        'wanted["metadata"]["annotations"][APPLIED_ANNOTATION]:\n            return False\n',
        "operator/reconciling/test_repair.py::test_an_edited_child_is_put_right_and_stays_so",
    ),
    Mutation.of(
        "the objects of what runs go before the record of what was planned",
        f"{OPERATOR}/reconciling/apply.py",
        "return [record_of(owner, rollout.pin), *objects(owner, running, rollout.strategy, others, around, render)]",
        "return [*objects(owner, running, rollout.strategy, others, around, render), record_of(owner, rollout.pin)]",
        "operator/reconciling/test_reconciler.py::test_the_record_is_written_before_the_deployment_that_runs_it",
    ),
    Mutation.of(
        "more replicas are another input of the plan",
        f"{OPERATOR}/planning/restart_fields.py",
        '    "replicas": True,\n',
        "",
        "operator/reconciling/test_reconciler.py::test_scaling_changes_the_number_of_pods_and_nothing_about_them",
    ),
    Mutation.of(
        "a field that is not known is left to the API server",
        f"{OPERATOR}/api/base.py",
        'extra="forbid"',
        'extra="ignore"',
        "operator/api/test_load.py::test_a_bad_manifest_is_reported_in_one_sentence",
    ),
    Mutation.of(
        "a revision that replaces pods in place is not rolled back: the next spec mends it",
        f"{OPERATOR}/rollout/rollout.py",
        "rolls_back = in_place or adopted or inputs.pin.marks.failure is not None or is_of_a_canary(failure)",
        "rolls_back = adopted or inputs.pin.marks.failure is not None or is_of_a_canary(failure)",
        "operator/rollout/test_rollback.py::test_what_fails_in_place_is_rolled_back_by_itself",
    ),
    Mutation.of(
        "a write may begin until the time at which it has to be over",
        f"{OPERATOR}/kube/fence.py",
        "if self._clock() >= self._write_until:",
        "if self._clock() >= self._over_by:",
        "operator/kube/test_fence.py::test_a_closed_fence_lets_no_write_out_and_every_read",
    ),
]

PLANNED = [
    Mutation.of(
        "CUDA graphs take the same memory for any number of layers",
        f"{OPERATOR}/planning/sizing/memory_ledger.py",
        '"graphs_bytes": GRAPHS_BYTES_PER_LAYER * shape.num_layers,',
        '"graphs_bytes": GRAPHS_BYTES_PER_LAYER,',
        "operator/planning/test_golden.py::test_a_plan_is_the_approved_one",
    ),
    Mutation.of(
        "each rank needs a KV head of its own",
        f"{OPERATOR}/planning/sizing/tensor_parallel.py",
        "shape.num_kv_heads % size and size % shape.num_kv_heads:",
        "shape.num_kv_heads % size:",
        "operator/facts/test_left_out_nodes.py"
        "::test_a_size_that_the_model_does_not_allow_is_refused_where_the_gpus_are_not_known",
    ),
    Mutation.of(
        "what this runtime could round while it loads may be chosen unasked",
        f"{OPERATOR}/planning/choices/quantization.py",
        'if "FP8" in choosable.online_quantization_methods else ()',
        'if "FP8" in choosable.rounded_quantization_methods else ()',
        "operator/planning/test_rounded_weights.py"
        "::test_without_a_method_nothing_is_rounded_and_the_plan_says_how_to_have_it",
    ),
    Mutation.of(
        "a plan that does not fit ends as any other failure does",
        f"{COMMAND_LINE}/commands/plan.py",
        "EXIT_FEASIBLE, EXIT_INFEASIBLE = 0, 2",
        "EXIT_FEASIBLE, EXIT_INFEASIBLE = 0, 1",
        "plan_cli/test_plan_command.py::test_infeasible_ends_with_2_and_says_what_would_do",
    ),
]

ANSWERED = [
    Mutation.of(
        "the first half of a head turns with the plus sign, the second with the minus",
        f"{RUNTIME}/models/layers/rope.py",
        "torch.cat((-sin, sin), dim=-1)",
        "torch.cat((sin, -sin), dim=-1)",
        "engine/test_parity.py::test_greedy_equals_transformers_in_a_batch_and_chunked",
    ),
    Mutation.of(
        "blocks that ascend follow one another",
        f"{RUNTIME}/engine/scheduling/block_manager.py",
        "    if blocks and block != blocks[-1] + 1:\n",
        "    if blocks and block <= blocks[-1]:\n",
        "engine/test_parity.py::test_preemption_changes_no_token",
    ),
    Mutation.of(
        "rows of one batch with the same seed get different tokens",
        f"{RUNTIME}/engine/sampling/sampler.py",
        "return uniform(rows[index].seed, rows[index].position, attempt)\n\n    highest",
        "return uniform(rows[index].seed + index, rows[index].position, attempt)\n\n    highest",
        "engine/sampling/test_sampler.py::test_a_seed_gives_the_tokens_that_it_always_gave",
    ),
    Mutation.of(
        "of several stop strings the one that is listed first ends the answer",
        f"{RUNTIME}/server/openai/stop_strings.py",
        "position = min((at for stop in self._stops if (at := text.find(stop)) >= 0), default=-1)",
        "position = next((at for stop in self._stops if (at := text.find(stop)) >= 0), -1)",
        "server/openai/test_stop_strings.py::test_the_text_before_the_first_stop_string_is_shown_and_nothing_of_it",
    ),
    Mutation.of(
        "the prompts of all tenants begin with the same hash",
        f"{RUNTIME}/engine/scheduling/prefix_cache.py",
        "(fixed_size, sequence.kv_variant, salt)",
        '(fixed_size, sequence.kv_variant, b"")',
        "engine/scheduling/test_prefix_cache.py::test_salts_keep_tenants_apart_and_the_chain_tells_positions_apart",
    ),
    Mutation.of(
        "the keys of a draft that fell count as computed",
        f"{RUNTIME}/engine/accepting.py",
        "            if one.token_id != draft or sequence.has_ended:\n                break\n"
        "            self.scheduler.count_accepted(sequence)\n",
        "            self.scheduler.count_accepted(sequence)\n"
        "            if one.token_id != draft or sequence.has_ended:\n                break\n",
        "engine/speculation/test_several_tokens.py::test_a_bad_drafter_changes_no_token",
    ),
    Mutation.of(
        "half-bytes of an AWQ word are read in the order in which they are written",
        f"{RUNTIME}/quantization/awq.py",
        "PLACES = (0, 4, 1, 5, 2, 6, 3, 7)",
        "PLACES = (0, 2, 4, 6, 1, 3, 5, 7)",
        "quantization/test_packed_checkpoints.py::test_a_folder_gives_the_logits_that_its_packer_computes",
    ),
]

SERVED = [
    Mutation.of(
        "a wrong key in the right scheme gets in",
        f"{RUNTIME}/server/http/api_keys.py",
        'if not (is_users or is_probes) or scheme.lower() != "bearer":',
        'if not (is_users or is_probes) and scheme.lower() != "bearer":',
        "server/http/test_api_keys.py::test_only_holders_of_a_key_get_in_probes_excepted",
    ),
    Mutation.of(
        "an unknown parameter is named in the sentence alone",
        f"{RUNTIME}/server/http/api_errors.py",
        'return ApiError(400, f"Unknown parameter: \'{name}\'.{hint}", param=name, code="unknown_parameter")',
        'return ApiError(400, f"Unknown parameter: \'{name}\'.{hint}", code="unknown_parameter")',
        "server/http/test_bad_requests.py::test_a_bad_parameter_is_named",
    ),
    Mutation.of(
        "a request is admitted as long as there is one free place, however many answers it wants",
        f"{RUNTIME}/server/operations/admission.py",
        "if self.in_flight + count > self.capacity and not self._is_within_share(count, client):",
        "if self.in_flight >= self.capacity + count and not self._is_within_share(count, client):",
        "server/test_lifecycle.py::test_a_full_queue_is_a_429_and_empties_again",
    ),
    Mutation.of(
        "a drain refuses requests at the latest moment, quiet or not",
        f"{RUNTIME}/server/operations/drain.py",
        "return max(0.0, min(last_arrival + self.quiet_seconds, self.latest_close_at) - now)",
        "return max(0.0, max(last_arrival + self.quiet_seconds, self.latest_close_at) - now)",
        "server/operations/test_drain.py::test_it_closes_when_no_request_has_come_for_a_while",
    ),
    Mutation.of(
        "an engine is ready when it is loaded, and warms up while the first client connects",
        f"{RUNTIME}/engine_process/loop.py",
        "        engine.warm_up()\n        now = self._last_step_at_seconds = time.monotonic()\n"
        "        self._send(Ready(engine.stats(), now, now - began, step_threads(engine.threads), "
        "engine.step_times))\n",
        "        now = self._last_step_at_seconds = time.monotonic()\n"
        "        self._send(Ready(engine.stats(), now, now - began, step_threads(engine.threads), "
        "engine.step_times))\n        engine.warm_up()\n",
        "server/test_boot_report.py::test_ready_tells_the_threads_that_the_warm_up_chose",
    ),
    Mutation.of(
        "only files that git keeps have a digest to compare with",
        f"{RUNTIME}/sources/transfer.py",
        "        if self._expected is None:\n            return True\n",
        "        if self._expected is None or self._git is None:\n            return True\n",
        "sources/test_fetch_hub.py::test_content_that_stays_wrong_is_refused_and_leaves_nothing",
    ),
    Mutation.of(
        "a folder of pickled weights is a folder without weights",
        f"{RUNTIME}/models/loading/checkpoint.py",
        'for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))',
        'for pattern in ("*.pt", "*.pth") for path in folder.glob(pattern))',
        "models/loading/test_checkpoint.py::test_pickled_weights_are_refused_unread",
    ),
]

INSTALLED = [
    Mutation.of(
        "an operator that restarts pods may delete them",
        "charts/millstream/templates/rbac.yaml",
        "    resources: [pods]\n    verbs: [get, list, watch]\n",
        "    resources: [pods]\n    verbs: [get, list, watch, delete]\n",
        "chart/test_rights.py::test_every_kind_that_is_read_or_written_is_granted_and_no_more",
    ),
]

PROMISES = [*OPERATED, *PLANNED, *ANSWERED, *SERVED, *INSTALLED]
