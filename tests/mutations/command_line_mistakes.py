"""Mistakes in the command `millstream`, beyond those against its promises."""

from __future__ import annotations

from tests.mutations.mutation import COMMAND_LINE, OPERATOR, Mutation

MISTAKES = [
    Mutation.of(
        "of several files one that is valid is enough",
        f"{COMMAND_LINE}/commands/validate.py",
        "return 1 if failures else 0",
        "return 1 if failures == len(files) else 0",
        "server/test_command_line.py::test_a_wrong_manifest_is_one_sentence_for_serve_and_for_validate",
        "commands/test_validate.py::test_one_bad_file_among_good_ones_is_an_error",
    ),
    Mutation.of(
        "a field that is missing because it is misspelled is an error of its own",
        f"{OPERATOR}/api/validation/field_errors.py",
        'return [error for error in errors if error.details["type"] != "missing" or error.location not in meant]',
        "return errors",
        "operator/api/test_load.py::test_a_misspelled_required_field_is_one_error",
    ),
    Mutation.of(
        "of several plans one that fits is enough",
        f"{COMMAND_LINE}/commands/plan.py",
        "return EXIT_FEASIBLE if all(result.can_be_applied for result in results) else EXIT_INFEASIBLE",
        "return EXIT_FEASIBLE if any(result.can_be_applied for result in results) else EXIT_INFEASIBLE",
        "plan_cli/test_plan_command.py::test_several_files_end_with_the_worst",
    ),
    Mutation.of(
        "a percentile is the sample at or below it",
        f"{COMMAND_LINE}/bench/measure.py",
        "return ordered[below] + (ordered[above] - ordered[below]) * (position - below)",
        "return ordered[below]",
        "bench/test_measure.py::test_percentiles_by_hand",
    ),
    Mutation.of(
        "the time per token is the whole time, divided by all tokens",
        f"{COMMAND_LINE}/bench/measure.py",
        "return (self.e2e_seconds - self.ttft_seconds) / (self.completion_tokens - 1)",
        "return self.e2e_seconds / self.completion_tokens",
        "bench/test_measure.py::test_itl_is_between_chunks_and_tpot_between_counted_tokens",
    ),
    Mutation.of(
        "a lower throughput is better, as a lower latency is",
        f"{COMMAND_LINE}/bench/compare.py",
        'return "better" if (ratio > 1) is more_is_better else "worse"',
        'return "better" if ratio < 1 or more_is_better else "worse"',
        "bench/test_documents.py::test_ratios_are_b_over_a_and_say_which_way_is_better",
    ),
    Mutation.of(
        "lengths and arrivals are drawn from one stream of numbers",
        f"{COMMAND_LINE}/bench/workload.py",
        'rng = random.Random(f"{seed}/arrivals")  # noqa: S311',
        "rng = random.Random(seed * rate)  # noqa: S311",
        "bench/test_workload.py::test_a_seed_gives_the_same_arrivals_everywhere",
    ),
    Mutation.of(
        "a file is written over in place",
        f"{COMMAND_LINE}/saved_files.py",
        '            partial.write_text(text, encoding="utf-8", errors="replace")\n            partial.replace(path)\n',
        '            path.write_text(text, encoding="utf-8", errors="replace")\n',
        "commands/test_saved_files.py::test_a_file_is_replaced_whole",
    ),
    Mutation.of(
        "a word that is no flag completes as one",
        f"{COMMAND_LINE}/completion.py",
        "        if [[ $word == -* ]]; then\n          case",
        "        if true; then\n          case",
        "commands/test_completion.py::test_bash_completes",
    ),
    Mutation.of(
        "a line as long as the terminal is wide needs no cut",
        f"{COMMAND_LINE}/output_streams.py",
        "len(text) < columns else",
        "len(text) <= columns else",
        "commands/test_narrow_terminals.py::test_what_is_longer_than_a_row_is_cut",
    ),
]
