"""Mistakes in the operator, beyond those against its promises."""

from __future__ import annotations

from tests.mutations.mutation import OPERATOR, Mutation

PLANNING = [
    Mutation.of(
        "a plan that needs to know the GPUs comes before the edit that includes a node",
        f"{OPERATOR}/planning/planner.py",
        "if blind is not None and (INVENTORY not in blind.requires or not left_out):",
        "if blind is not None:",
        "operator/planning/test_left_out_nodes.py::test_the_edit_that_includes_a_tainted_node_is_offered",
    ),
    Mutation.of(
        "a limit below the process itself is short of tokens, as any other",
        f"{OPERATOR}/planning/planner.py",
        "if ledger.usable_bytes < ledger.context_bytes:",
        "if ledger.usable_bytes < 0:",
        "operator/planning/test_cpu_container.py::"
        "test_a_limit_below_the_process_itself_is_refused_by_name_with_a_limit_that_holds_the_model",
    ),
    Mutation.of(
        "of the products the one with the fewest GPUs wins",
        f"{OPERATOR}/planning/choices/placement.py",
        "key=lambda one: _order_of_products(one[0])",
        "key=lambda one: _order(one[0])",
        "operator/planning/test_placement.py::test_more_of_a_cheap_gpu_come_before_one_dear_one",
    ),
    Mutation.of(
        "a shorter context comes before waiting",
        f"{OPERATOR}/planning/planner.py",
        "functools.partial(search, may_shorten=False)",
        "search",
        "operator/planning/test_waiting.py::test_waiting_comes_before_a_context_that_clients_would_notice",
    ),
    Mutation.of(
        "M-RoPE beside a vision tower is refused by the plan",
        f"{OPERATOR}/catalog/read_shape.py",
        "has_tower=has_tower(config)",
        "has_tower=False",
        "contracts/test_rope_types.py::test_the_angles_of_images_are_plain_ones_for_text",
    ),
    Mutation.of(
        "a budget need not pay for the fewest replicas of an autoscaler",
        f"{OPERATOR}/planning/choices/evaluation.py",
        "max(replicas, resolved.replicas, resolved.fewest_autoscaled)",
        "max(replicas, resolved.replicas)",
        "operator/planning/test_estimated_prices.py::test_a_budget_pays_for_the_fewest_replicas_of_an_autoscaler",
    ),
    Mutation.of(
        "a price of one's own keeps the words about the shipped one",
        f"{OPERATOR}/catalog/gpu.py",
        'if "listPriceUSDPerHour" in fields:',
        'if "priceBasis" in fields:',
        "operator/catalog/test_gpu.py::test_a_price_of_ones_own_is_not_the_shipped_sources",
    ),
    Mutation.of(
        "a maxModelLen that the spec gives is a default that may shrink",
        f"{OPERATOR}/planning/choices/smaller_defaults.py",
        "    if resolved.max_model_len_is_given:\n        return\n",
        "",
        "operator/planning/test_smaller_defaults.py::test_what_the_spec_gives_does_not_shrink",
    ),
    Mutation.of(
        "stages that the runtime does not have are chosen where GPUs that are taken would do",
        f"{OPERATOR}/planning/choices/candidates.py",
        "range(2, min(MAX_PIPELINE, question.max_pipeline) + 1)",
        "range(2, MAX_PIPELINE + 1)",
        "operator/planning/test_waiting.py::test_what_waits_and_runs_comes_before_what_is_free_and_cannot_run",
    ),
    Mutation.of(
        "each rank holds its part of the KV heads, however few there are",
        f"{OPERATOR}/planning/sizing/weights.py",
        "copied = shape.kv_projection_parameters * shape.kv_heads_per_rank(tensor) // shape.num_kv_heads",
        "copied = shape.kv_projection_parameters // tensor",
        "operator/planning/test_rank_weights.py::test_ranks_that_share_a_kv_head_each_hold_its_projections",
    ),
    Mutation.of(
        "replicas that cost as much as the budget are beyond it",
        f"{OPERATOR}/planning/scaling_cost.py",
        "return found + 1 if monthly_usd(each, found + 1) <= max_monthly_usd else found",
        "return found + 1 if monthly_usd(each, found + 1) < max_monthly_usd else found",
        "operator/planning/test_scaling_cost.py::test_a_cost_that_is_rounded_down_to_the_budget_is_within_it",
    ),
    Mutation.of(
        "a promise of GPUs is met from the emptiest node",
        f"{OPERATOR}/inventory/packing.py",
        "tightest = min((size for name, size in free if name == part and size >= gpus), default=None)",
        "tightest = max((size for name, size in free if name == part and size >= gpus), default=None)",
        "operator/inventory/test_accounts.py::test_each_is_taken_from_the_node_that_it_fills_best",
    ),
    Mutation.of(
        "a toleration without an effect tolerates no effect",
        f"{OPERATOR}/inventory/demands.py",
        'and self.effect in ("", taint.effect)',
        "and self.effect == taint.effect",
        "operator/inventory/test_demands.py::test_which_tolerations_cover_a_taint",
    ),
    Mutation.of(
        "GPUs that a plan was promised are not free for its owner either",
        f"{OPERATOR}/inventory/accounts.py",
        "            wanted[mine[0]] -= mine[1]\n        remaining",
        "            wanted[mine[0]] -= 0\n        remaining",
        "operator/inventory/test_accounts.py::test_own_pods_and_promises_count_as_free_for_the_own_next_plan_alone",
    ),
    Mutation.of(
        "the smallest suffix that leaves a whole number is the server's",
        f"{OPERATOR}/api/quantity.py",
        "key=lambda item: -item[1]",
        "key=lambda item: item[1]",
        "operator/api/test_quantity.py::test_the_servers_form",
    ),
]

ROLLOUTS = [
    Mutation.of(
        "a crash is certain at the first restart",
        f"{OPERATOR}/rollout/certain_failure.py",
        "CERTAIN_RESTARTS = 3",
        "CERTAIN_RESTARTS = 1",
        "operator/rollout/test_certain_failure.py::test_what_is_certain",
    ),
    Mutation.of(
        "a registry that is away is a failure of the revision",
        f"{OPERATOR}/rollout/retry.py",
        "        Reason.IMAGE_PULL_FAILED,\n",
        "",
        "operator/rollout/test_retry.py::test_an_outage_of_the_registry_is_tried_again_and_succeeds",
    ),
    Mutation.of(
        "evidence counts what a pod answered before the shift",
        f"{OPERATOR}/rollout/traffic_shift/evidence.py",
        "            part = one.traffic.since(last.traffic)\n",
        "            part = one.traffic\n",
        "operator/rollout/test_staged_shift.py::test_a_busy_model_moves_on_after_enough_requests",
    ),
    Mutation.of(
        "a canary is worse when fewer of its answers end at their limit",
        f"{OPERATOR}/rollout/traffic_shift/traffic_judgement.py",
        "return new.length / new.complete - old.length / old.complete >= LEAST_LENGTH_DIFFERENCE",
        "return True",
        "operator/rollout/test_traffic_judgement.py::test_what_is_worse",
    ),
    Mutation.of(
        "a stage that is held goes on after its timeout",
        f"{OPERATOR}/rollout/traffic_shift/staged_shift.py",
        "(timed_out and proceeds(owner))",
        "timed_out",
        "operator/rollout/test_staged_shift.py::test_a_stage_is_held_until_it_has_its_evidence_where_the_spec_says_so",
    ),
    Mutation.of(
        "a value of retry is tried again and again",
        f"{OPERATOR}/rollout/retry.py",
        "if (asked := asked_retry(owner)) is not None and asked != failure.retry:",
        "if (asked := asked_retry(owner)) is not None:",
        "operator/rollout/test_retry.py::test_a_value_that_was_there_when_it_failed_is_no_attempt",
    ),
    Mutation.of(
        "the history counts the records that are kept in any case a second time",
        f"{OPERATOR}/rollout/pruning.py",
        "min(HISTORY_LIMIT - len(keep), ",
        "min(HISTORY_LIMIT, ",
        "operator/rollout/test_revisions.py::test_history_is_limited_and_the_current_record_is_never_pruned",
    ),
    Mutation.of(
        "replicas that find no GPU are a failure of those that serve",
        f"{OPERATOR}/status/blocking_policies.py",
        "return None if observation.is_serving and problem.reason in NOT_OF_WHAT_SERVES else problem",
        "return problem",
        "operator/status/test_scaling.py::test_new_replicas_that_find_no_gpu_leave_ready_and_are_shown",
    ),
    Mutation.of(
        "a surge that finds no GPU drains a pod under Availability, too",
        f"{OPERATOR}/rollout/approach.py",
        "    if asked is SURGE:\n        return Approach(SURGE, blocked=_waits(one, room) if one.unplaced else None)\n",
        "    if asked is SURGE and not one.unplaced:\n        return Approach(SURGE)\n",
        "operator/rollout/test_rollout.py::test_availability_that_is_insisted_on_waits_for_a_gpu",
    ),
]

CONTROL = [
    Mutation.of(
        "a Lease that was edited to have no holder is free",
        f"{OPERATOR}/leadership/election.py",
        "return not self.holder and self.duration_seconds <= RELEASED_SECONDS",
        "return not self.holder",
        "operator/leadership/test_leadership.py::test_a_released_lease_is_taken_at_once_and_an_emptied_one_is_not",
    ),
    Mutation.of(
        "a leader counts its lease from the answer to its write",
        f"{OPERATOR}/leadership/election.py",
        "self.write_until = sent + self.timing.renew_deadline_seconds",
        "self.write_until = now + self.timing.renew_deadline_seconds",
        "operator/leadership/test_leadership.py::test_the_first_one_looks_and_creates",
    ),
    Mutation.of(
        "a key that was added while it ran waits for its backoff",
        f"{OPERATOR}/queue/schedule.py",
        "        if again is not None:\n            self.add(key, max(again.due, now), again.rank - again.due)\n",
        "        if again is not None and not failed:\n"
        "            self.add(key, max(again.due, now), again.rank - again.due)\n",
        "operator/queue/test_work_queue.py::test_a_change_of_a_failing_key_does_not_wait_for_its_backoff",
    ),
    Mutation.of(
        "a listing forgets whatever it does not have",
        f"{OPERATOR}/kube/index.py",
        "if _key(kind, manifest)[1:] not in present and _version(manifest) <= int(list_version):",
        "if _key(kind, manifest)[1:] not in present:",
        "operator/kube/test_index.py::test_a_listing_forgets_what_is_gone_and_returns_the_affected_owners",
    ),
    Mutation.of(
        "a deletion of a predecessor forgets its successor of the same name",
        f"{OPERATOR}/kube/index.py",
        'if known is None or known["metadata"]["uid"] != manifest["metadata"]["uid"]:',
        "if known is None:",
        "operator/kube/test_index.py::test_a_deletion_takes_the_object_it_names_and_not_its_successor",
    ),
    Mutation.of(
        "an object whose name is ours is ours",
        f"{OPERATOR}/children/children.py",
        "return controller_uid(manifest) == owner.metadata.uid",
        'return _controller(manifest).get("name") == owner.name',
        "operator/reconciling/test_reconciler.py::test_a_namesakes_children_are_waited_for_and_not_taken_over",
    ),
    Mutation.of(
        "an answer of another configuration is one of the same model",
        f"{OPERATOR}/probing/service_probe.py",
        'if body.get("config_hash") == revision.config_hash and body.get("model") == served_name:',
        'if body.get("config_hash") == revision.config_hash or body.get("model") == served_name:',
        "operator/reconciling/test_ready.py::test_pods_alone_are_not_ready",
    ),
    Mutation.of(
        "a model's own namespace may call it, whoever is declared",
        f"{OPERATOR}/rendering/network_policy.py",
        "admitted = [*_operator(operator_namespace), *map(_plain, ingress)]",
        'admitted = [{"podSelector": {}}, *_operator(operator_namespace), *map(_plain, ingress)]',
        "operator/rendering/test_network_policy.py::test_declared_peers_and_the_operator_are_admitted_and_no_one_else",
    ),
    Mutation.of(
        "the kubelet ends a pod when its drain does",
        f"{OPERATOR}/rendering/pod_template.py",
        '"terminationGracePeriodSeconds": plan.drain_timeout_seconds + DRAIN_MARGIN_SECONDS,',
        '"terminationGracePeriodSeconds": plan.drain_timeout_seconds,',
        "operator/rendering/test_pod.py::test_grace_covers_the_longest_drain",
    ),
    Mutation.of(
        "a container that ended with a failure crashed, though the kernel killed it for its memory",
        f"{OPERATOR}/diagnosis/container_failures.py",
        '    if ended.get("reason") == "OOMKilled":\n        return _killed_for_memory(pod, plan)\n',
        '    if ended.get("reason") == "OOMKilled" and code == 0:\n        return _killed_for_memory(pod, plan)\n',
        "operator/diagnosis/test_diagnosis.py::test_out_of_memory_shows_the_planned_memory_and_the_limit",
    ),
    Mutation.of(
        "a policy that cannot judge yet has denied, as every other does",
        f"{OPERATOR}/diagnosis/admission.py",
        "        return Diagnosis(Reason.ADMISSION_UNAVAILABLE, sentence(detail), hint, NOT_JUDGED_YET)",
        "        return Diagnosis(Reason.ADMISSION_DENIED, sentence(detail), hint)",
        "operator/diagnosis/test_admission.py::test_a_policy_of_the_chart_that_cannot_judge_yet_needs_no_person",
    ),
    Mutation.of(
        "an object that is being deleted is reconciled until it is gone",
        f"{OPERATOR}/reconciling/reconciler.py",
        'return None if manifest is None or manifest["metadata"].get("deletionTimestamp") else manifest',
        "return manifest",
        "operator/reconciling/test_reconciler.py::test_an_object_that_is_being_deleted_is_not_repaired",
    ),
    Mutation.of(
        "a hub's token is an argument, which the kubelet fills in",
        f"{OPERATOR}/rendering/source_access.py",
        'return SourceAccess([*flags, f"--token-file={TOKEN_FOLDER}/{_named(token)}"], [volume], [mount])',
        'return SourceAccess([*flags, f"--token=$(HF_TOKEN_{token.key})"], [volume], [mount])',
        "operator/rendering/test_model_source.py::test_a_token_is_a_file_and_in_no_argument",
    ),
    Mutation.of(
        "a spec that says something of the runtime has an image of its own",
        f"{OPERATOR}/api/validation/environment_rules.py",
        "    if spec.runtime is not None and spec.runtime.image is not None:\n",
        "    if spec.runtime is not None:\n",
        "operator/api/test_environment_rules.py::test_a_spec_without_an_image_has_the_default_one",
    ),
    Mutation.of(
        "what is stored stays, whichever image it is stored with",
        f"{OPERATOR}/api/validation/environment_rules.py",
        "exists(old, !{_has_own_image('old')} && {_has_containers('old')} && ",
        "exists(old, {_has_containers('old')} && ",
        "operator/api/test_environment_rules.py::test_an_object_that_leaves_its_own_image_is_judged_as_new",
    ),
]

DELETED = "operator/reconciling/test_deleted_owner.py"
DELETIONS = [
    Mutation.of(
        "an object that the index has not is deleted",
        f"{OPERATOR}/reconciling/stop.py",
        "        if not is_deleted(await self._client.get(LLM_DEPLOYMENT, key.namespace, key.name), uid):\n"
        "            return\n",
        "",
        f"{DELETED}::test_an_index_that_lost_the_object_costs_nobody_a_pod",
    ),
    Mutation.of(
        "what was read a moment ago is what is written",
        f"{OPERATOR}/reconciling/stop.py",
        'change = {"metadata": {"resourceVersion": live["metadata"]["resourceVersion"]}, **self._workloads.to_zero()}',
        "change = self._workloads.to_zero()",
        f"{DELETED}::test_orphans_that_are_made_between_look_and_write_keep_their_pods",
    ),
    Mutation.of(
        "an object of the same name is the same object",
        f"{OPERATOR}/children/deleted_owners.py",
        'if owner is None or owner["metadata"]["uid"] != uid:',
        "if owner is None:",
        f"{DELETED}::test_a_successor_of_the_same_name_serves_with_a_deployment_of_its_own",
    ),
    Mutation.of(
        "an object that is being deleted is deleted",
        f"{OPERATOR}/children/deleted_owners.py",
        "return is_terminating and FOREGROUND in finalizers and ORPHANS not in finalizers",
        "return is_terminating and ORPHANS not in finalizers",
        f"{DELETED}::test_an_object_whose_children_the_collector_leaves_keeps_its_pods",
    ),
    Mutation.of(
        "one of several owners is the owner",
        f"{OPERATOR}/children/deleted_owners.py",
        "    if len(references) != 1 or",
        "    if not references or",
        f"{DELETED}::test_another_owners_deployment_is_not_touched",
    ),
    Mutation.of(
        "every key is that of an LLMDeployment that exists",
        f"{OPERATOR}/app.py",
        "            self._enqueue(owner_key(LLM_DEPLOYMENT, manifest))\n        self._enqueue_left_running()\n",
        "            self._enqueue(owner_key(LLM_DEPLOYMENT, manifest))\n",
        "operator/test_app.py::test_what_was_deleted_while_nobody_watched_is_enqueued",
    ),
]

ADDED_CONTAINERS = [
    Mutation.of(
        "a Job is tried again once it has ended",
        f"{OPERATOR}/facts/job_attempts.py",
        "    if seconds_ago is not None:\n        return seconds_ago\n",
        "    return seconds_ago\n",
        "operator/facts/test_added_containers.py::test_a_sidecar_that_never_ends_delays_no_attempt",
    ),
    Mutation.of(
        "a sidecar that the kubelet ends after the work is a download that failed",
        f"{OPERATOR}/facts/job_attempts.py",
        ' and init.get("name") not in sidecars',
        "",
        "operator/facts/test_added_containers.py::test_a_native_sidecar_that_the_kubelet_ends_fails_nothing",
    ),
    Mutation.of(
        "what a webhook added to the pod is not our trouble",
        f"{OPERATOR}/diagnosis/container_failures.py",
        "    return diagnose_added_containers(pod, RUNTIME_CONTAINER)\n",
        "    return None\n",
        "operator/diagnosis/test_diagnosis.py::test_a_failing_pod_is_one_reason_and_one_sentence",
    ),
]

ORPHANS = [
    Mutation.of(
        "whatever has our labels and no owner is an orphan of ours",
        f"{OPERATOR}/children/orphans.py",
        "return is_named_so and is_labelled and APPLIED_ANNOTATION in annotations and is_known",
        "return is_named_so and is_labelled",
        "operator/reconciling/test_orphans.py::test_an_object_that_is_not_a_marked_orphan_is_left_alone_and_named",
        "operator/reconciling/test_orphans.py::test_without_a_record_that_can_be_read_nothing_is_taken",
    ),
    Mutation.of(
        "an object that has an owner by now is still an orphan",
        f"{OPERATOR}/reconciling/adopt_orphans.py",
        "orphans = [one for one in live if is_orphan(kind_of(one), one, key.name)]",
        "orphans = live",
        "operator/reconciling/test_orphans.py::test_what_another_controller_adopted_meanwhile_is_not_written",
    ),
    Mutation.of(
        "a Secret that is deleted is noticed when the model is next asked for a token",
        f"{OPERATOR}/reconciling/probe.py",
        "if now >= known.keys_due:",
        "if now >= known.due:",
        "operator/reconciling/test_authentication.py::"
        "test_a_secret_that_is_deleted_is_a_condition_within_a_minute_or_so",
    ),
    Mutation.of(
        "GPUs that are taken are GPUs that no node has",
        f"{OPERATOR}/inventory/accounts.py",
        "return not self._nodes and not self._pools",
        "return not self._pools",
        "operator/rollout/test_scheduler_kit.py::test_the_operator_reads_why_no_node_takes_a_pod",
    ),
]

TWO_RELEASES = [
    Mutation.of(
        "an object of another release is ours once its Lease is old by this machine's clock",
        f"{OPERATOR}/leadership/ownership.py",
        "return is_old and self.unchanged_seconds >= LEAST_UNCHANGED_SECONDS",
        "return is_old",
        "operator/leadership/test_ownership.py::test_who_manages_it",
    ),
    Mutation.of(
        "a status that meets a Conflict is written again, whoever manages the object now",
        f"{OPERATOR}/reconciling/status_writer.py",
        "if self._release is not None and manager not in (None, self._release):",
        "if manager is not None and self._release is None:",
        "operator/reconciling/test_two_releases.py::test_a_turn_that_is_overtaken_does_not_take_the_object_back",
    ),
    Mutation.of(
        "the claim is an apply of the newest state, so the later of two releases has it",
        f"{OPERATOR}/reconciling/claim.py",
        '("name", "namespace", "resourceVersion")',
        '("name", "namespace")',
        "operator/reconciling/test_two_releases.py"
        "::test_of_two_that_find_it_unmanaged_the_slower_one_gets_a_conflict_and_leaves_it",
    ),
]

CPU_PLANS = [
    Mutation.of(
        "a plan of 16 bits needs no word in boot.json: auto is the checkpoint's own dtype",
        f"{OPERATOR}/rendering/runtime_config.py",
        '_CPU_DTYPES = {"BF16": DType.BFLOAT16, "FP16": DType.FLOAT16}',
        '_CPU_DTYPES = {"BF16": DType.AUTO, "FP16": DType.AUTO}',
        "operator/planning/test_cpu_dtype.py::test_the_dtype_is_the_checkpoints",
    ),
    Mutation.of(
        "a draft's weights are held as its own checkpoint has them, whatever its target's are",
        f"{OPERATOR}/planning/choices/cpu_dtype.py",
        "draft.is_gguf or cpu_dtype(spec, target, runtime) == WIDEST",
        "draft.is_gguf",
        "operator/planning/test_cpu_dtype.py::test_a_draft_model_is_float32_where_its_target_is",
    ),
    Mutation.of(
        "all weights of a 16-bit checkpoint are held in two bytes",
        f"{OPERATOR}/planning/sizing/cpu_memory.py",
        "(parameters.total - wide) * shape.compute_bytes + wide * FLOAT32_BYTES",
        "parameters.total * shape.compute_bytes",
        "contracts/test_cpu_quantization.py::test_plain_weights_are_counted_as_they_are_held",
    ),
]

KEPT_PLANS = [
    Mutation.of(
        "the KV cache is compared without the draft's part, which the plan has in it",
        f"{OPERATOR}/status/kept_plan.py",
        'measured["kvCacheBytes"] + measured.get("draftKvCacheBytes", 0)',
        'measured["kvCacheBytes"]',
        "operator/status/test_kept_plan.py::test_a_tenth_less_than_planned_is_named",
    ),
]

INSPECTIONS = [
    Mutation.of(
        "whoever wants the same source takes the answer of a hub that another object chose",
        f"{OPERATOR}/rendering/inspect_job.py",
        '("image", "args", "env", "volumeMounts")',
        '("image", "args", "volumeMounts")',
        "operator/facts/test_shared_inspections.py::test_the_answer_of_a_hub_that_another_object_chose_is_not_taken",
    ),
]

MISTAKES = [
    *INSPECTIONS,
    *KEPT_PLANS,
    *CPU_PLANS,
    *PLANNING,
    *ROLLOUTS,
    *CONTROL,
    *DELETIONS,
    *ADDED_CONTAINERS,
    *ORPHANS,
    *TWO_RELEASES,
]
