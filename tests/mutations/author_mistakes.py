"""Mistakes in what bounds the authors of LLMDeployments, and the holders of keys, against each other."""

from __future__ import annotations

from tests.mutations.mutation import OPERATOR, RUNTIME, Mutation

MISTAKES = [
    Mutation.of(
        "a stored profile may become another one",
        f"{OPERATOR}/api/validation/author_rules.py",
        "key in old && old[key] == self[key])",
        "key in old)",
        "operator/api/test_author_rules.py::test_what_is_stored_stays_and_a_worse_value_is_refused",
    ),
    Mutation.of(
        "a stored object without a policy is refused at its next edit",
        f"{OPERATOR}/api/validation/author_rules.py",
        'f"self in {_listed(modes)} || (oldSelf.hasValue() && oldSelf.value() == self)"',
        'f"self in {_listed(modes)}"',
        "operator/api/test_author_rules.py::test_what_is_stored_stays_and_a_worse_value_is_refused",
    ),
    Mutation.of(
        "the chart's list of classes reaches no rule",
        "charts/millstream/templates/crds.yaml",
        "\"'system-']\" ($authors.allowedPriorityClasses | default list)",
        "\"'system-']\" list",
        "chart/test_authors.py::test_each_value_changes_its_rule_and_no_other",
    ),
    Mutation.of(
        "of large records as many are kept as of small ones",
        f"{OPERATOR}/rollout/pruning.py",
        "min(HISTORY_LIMIT - len(keep), _num_within_bytes(newest, keep, others))",
        "HISTORY_LIMIT - len(keep)",
        "operator/rollout/test_revisions.py::test_of_large_records_fewer_are_kept_and_never_fewer_than_what_is_needed",
    ),
    Mutation.of(
        "the index drops what a failed revision goes back to",
        f"{OPERATOR}/kube/large_records.py",
        "one is newest_first[0] or one is answered",
        "one is newest_first[0]",
        "operator/kube/test_large_records.py::test_the_newest_and_the_newest_that_answered_are_whole_in_any_order",
    ),
    Mutation.of(
        "a listing of large objects has pages of as many as of small ones",
        f"{OPERATOR}/kube/client.py",
        "min(self._limit, num_objects * PAGE_BYTES // max(1, num_bytes))",
        "self._limit",
        "operator/kube/test_page_sizes.py::test_pages_of_large_objects_are_about_a_megabyte",
    ),
    Mutation.of(
        "a Service that selects by the operator's labels alone is a stranger's",
        f"{OPERATOR}/children/foreign_services.py",
        ".items() <= labels.items() and any(map(is_of_author, selector))",
        ".items() <= labels.items()",
        "operator/reconciling/test_foreign_services.py::test_a_service_selects_by_all_labels_of_its_selector",
    ),
    Mutation.of(
        "of the keys of rank the one that was served more has the turn",
        f"{RUNTIME}/engine/scheduling/fair_queue.py",
        "(RANK_TOKENS if client in self._above else 0)",
        "(RANK_TOKENS * RANK_TOKENS // (1 + self._served.get(client, 0)) if client in self._above else 0)",
        "engine/scheduling/test_fair_queue.py::test_a_key_of_rank_comes_before_the_others_and_shares_with_its_equals",
    ),
    Mutation.of(
        "a key that is called like the rank has it",
        f"{RUNTIME}/server/http/key_file.py",
        "len(words) == 2 and words[1] == ABOVE",
        "words[-1] == ABOVE",
        "server/http/test_api_keys.py::test_a_key_ranks_above_the_others_where_its_line_says_so",
    ),
]
