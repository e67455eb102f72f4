"""Mistakes in what is no Python: the chart, the CRD, catalogues and lists of versions."""

from __future__ import annotations

from tests.mutations.mutation import OPERATOR, Mutation

CHART = "charts/millstream"

PAGES = [
    Mutation.of(
        "a command of a page needs no file that is there",
        "docs/model-sources.md",
        "millstream inspect --path models/demo-chat ",
        "millstream inspect --path models/demo-chats ",
        "commands/test_console_blocks.py::test_the_commands_of_a_page_end_as_it_says",
    ),
    Mutation.of(
        "a command that needs no cluster may stand among those that do",
        "docs/planning.md",
        "millstream plan examples/mid.yaml --kubeconfig FILE --diff",
        "millstream plan examples/mid.yaml --diff",
        "commands/test_console_blocks.py::test_a_block_that_is_not_run_needs_what_its_mark_says",
    ),
]

CHART_FILES = [
    Mutation.of(
        "an operator that checks API keys may read Secrets",
        f"{CHART}/templates/rbac.yaml",
        "    resources: [services, serviceaccounts, configmaps]\n",
        "    resources: [services, serviceaccounts, configmaps, secrets]\n",
        "chart/test_rights.py::test_rights_are_spelled_out_and_leave_secrets_alone",
    ),
    Mutation.of(
        "a policy about the operator's user may judge every user",
        f"{CHART}/templates/admission-pods.yaml",
        """    - name: it-is-the-operator
      expression: {{ include "millstream.isOperator" . | quote }}""",
        """    - name: it-is-an-account
      expression: "request.userInfo.username.startsWith('system:serviceaccount:')\"""",
        "chart/test_admission_policies.py::test_the_policies_judge_the_operators_user_alone",
    ),
    Mutation.of(
        "the operator has a Secret of its own, so Secrets are among its kinds",
        f"{CHART}/templates/admission-children.yaml",
        "'/services', '/serviceaccounts', '/configmaps',\n",
        "'/services', '/serviceaccounts', '/configmaps', '/secrets',\n",
        "chart/test_admission_policies.py::test_the_kinds_that_it_may_write_are_those_that_the_operator_owns",
    ),
    Mutation.of(
        "a helm that lists no policies renders none",
        f"{CHART}/templates/_helpers.tpl",
        ' (not ($kinds.Has "v1/Pod")) -}}',
        " false -}}",
        "chart/test_admission_policies.py::test_they_are_left_out_where_the_api_server_has_no_such_kind",
    ),
    Mutation.of(
        "who patches the status reads it first",
        f"{CHART}/templates/rbac.yaml",
        "    resources: [llmdeployments/status]\n    verbs: [patch]",
        "    resources: [llmdeployments/status]\n    verbs: [get, patch]",
        "chart/test_needed_rights.py::test_the_operator_asks_for_each_verb_that_it_has_and_for_no_other",
    ),
    Mutation.of(
        "an operator that lives is ready",
        f"{CHART}/templates/deployment.yaml",
        "            httpGet: {path: /readyz, port: health}",
        "            httpGet: {path: /healthz, port: health}",
        "chart/test_operator_pod.py::test_probes_and_metrics_reach_the_port_that_the_policy_leaves_open",
    ),
    Mutation.of(
        "what the operator refuses at its start needs no refusal by helm",
        f"{CHART}/values.schema.json",
        '"discoverySeconds": {"type": "integer", "minimum": 5, "maximum": 3600}',
        '"discoverySeconds": {"type": "integer", "minimum": 1, "maximum": 3600}',
        "chart/test_values.py::test_helm_refuses_what_the_operator_would_refuse_at_its_start",
    ),
]

API_FILES = [
    Mutation.of(
        "a cache may become smaller",
        "crds/millstream.dev_llmdeployments.yaml",
        "rule: quantity(self.size).compareTo(quantity(oldSelf.size)) >= 0",
        "rule: quantity(self.size).compareTo(quantity(oldSelf.size)) != 0",
        "operator/api/test_crd.py::test_the_committed_copies_are_what_the_types_say",
    ),
    Mutation.of(
        "the chart's copy of the CRD is a release behind",
        f"{CHART}/files/llmdeployments.yaml",
        "rule: quantity(self.size).compareTo(quantity(oldSelf.size)) >= 0",
        "rule: self.size == oldSelf.size",
        "operator/api/test_crd.py::test_the_committed_copies_are_what_the_types_say",
    ),
]

DATA_FILES = [
    Mutation.of(
        "a bandwidth has a digit too few",
        f"{OPERATOR}/catalog/gpus.yaml",
        "    usableMemoryBytes: 84986665370          # 79.15 GiB\n    memoryBandwidthBytesPerSecond: 2039000000000\n",
        "    usableMemoryBytes: 84986665370          # 79.15 GiB\n    memoryBandwidthBytesPerSecond: 203900000000\n",
        "operator/catalog/test_gpu.py::test_facts_hang_together",
    ),
    Mutation.of(
        "a link between GPUs is counted in both directions",
        f"{OPERATOR}/catalog/gpus.yaml",
        "    nvlinkBytesPerSecond: 300000000000\n    nvlinkIslandSize: 8\n    pcieBytesPerSecond: 31500000000\n"
        "    gpusPerNode: 8\n    listPriceUSDPerHour: 3.431\n",
        "    nvlinkBytesPerSecond: 600000000000\n    nvlinkIslandSize: 8\n    pcieBytesPerSecond: 31500000000\n"
        "    gpusPerNode: 8\n    listPriceUSDPerHour: 3.431\n",
        "operator/planning/test_golden.py::test_a_plan_is_the_approved_one",
        "operator/catalog/test_gpu.py::test_the_hash_of_facts_is_that_of_stored_plans",
    ),
    Mutation.of(
        "a published model has as many KV heads as query heads",
        f"{OPERATOR}/catalog/known_models.yaml",
        "  llama-3-70b:\n    {model_type: llama, hidden_size: 8192, intermediate_size: 28672, num_hidden_layers: 80, "
        "num_attention_heads:\n     64, num_key_value_heads: 8,",
        "  llama-3-70b:\n    {model_type: llama, hidden_size: 8192, intermediate_size: 28672, num_hidden_layers: 80, "
        "num_attention_heads:\n     64, num_key_value_heads: 64,",
        "operator/catalog/test_model_shape.py::test_a_known_model_has_the_shape_of_its_published_config",
    ),
]

LOCKS = [
    Mutation.of(
        "a lock takes any newer version of torch",
        "requirements/runtime.txt",
        "\ntorch==2.11.0 \\\n",
        "\ntorch>=2.11.0 \\\n",
        "contracts/test_security_classes.py::test_every_dependency_is_pinned_with_a_hash",
    ),
    Mutation.of(
        "the operator's image carries the client of Kubernetes that the command line needs",
        "requirements/operator.txt",
        "\nkopf==",
        "\nkubernetes==33.1.0 --hash=sha256:" + "0" * 64 + "\nkopf==",
        "images/test_dependencies.py::test_the_operator_carries_no_package_that_it_never_imports",
    ),
]

BUILDS = [
    Mutation.of(
        "a wheel without the compiled kernels is better than none",
        "hack/wheel_hook.py",
        "if ended.returncode != 0:",
        "if ended.returncode < 0:",
        "kernels/test_wheel.py::test_a_build_that_cannot_compile_ends_and_names_the_package",
    ),
    Mutation.of(
        "make compiles again only when the old sources change",
        "Makefile",
        "paged_prefill.py product_vectors.py stored",
        "paged_prefill.py stored",
        "kernels/test_wheel.py::test_make_compiles_again_when_any_source_of_the_kernels_changes",
    ),
]

MISTAKES = [*PAGES, *CHART_FILES, *API_FILES, *DATA_FILES, *LOCKS, *BUILDS]
