"""`make soak` puts each trap back into the kernels; here, that it still can."""

from __future__ import annotations

from tests.mutations.kernel_traps import TRAPS


def test_each_trap_still_has_the_code_that_avoids_it_and_the_tests_that_notice() -> None:
    for mutation in TRAPS:
        compile(mutation.mutated(), mutation.file, "exec")
        assert mutation.missing_tests() == []
