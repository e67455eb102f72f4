"""Which revision runs: the pinned one as long as the spec asks for it, whatever else has changed."""

from __future__ import annotations

from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.planning.plan import PlanDefaults
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.revision import controller_revision
from millstream_operator.rendering.revision_marks import Marks
from millstream_operator.rollout.pruning import HISTORY_BYTES, HISTORY_LIMIT, prunable_records
from millstream_operator.rollout.revisions import PinnedRevision
from tests.support.llmdeployments import deployment
from tests.support.pinned_plans import choose

Manifest = dict[str, Any]
FIRST, SECOND = PlanDefaults("registry.example.com/runtime:1"), PlanDefaults("registry.example.com/runtime:2")
PODS = PodDefaults()


def stored(owner: LLMDeployment, number: int = 1, defaults: PlanDefaults = FIRST) -> Manifest:
    return controller_revision(owner, choose(owner, defaults, PODS, []).revision, number)


ONE, OTHER = deployment(), deployment(engine={"maxNumSeqs": 8})


def test_the_first_revision_is_planned_with_todays_defaults() -> None:
    pin = choose(ONE, FIRST, PODS, [])
    assert (pin.number, pin.revision.image) == (1, FIRST.runtime_image)


def test_while_the_spec_says_the_same_the_pinned_one_stays() -> None:
    """An upgrade of the operator: another default image, and other pod defaults."""
    pin = choose(ONE, SECOND, PodDefaults(priority_class_name="high"), [stored(ONE, 7)])
    assert pin == PinnedRevision(choose(ONE, FIRST, PODS, []).revision, 7)


def test_what_does_not_reach_the_pods_does_not_unpin() -> None:
    scaled = deployment(replicas=5, service={"port": 8080}, rollout={"progressDeadline": "3h"})
    assert choose(scaled, SECOND, PODS, [stored(ONE)]).revision.image == FIRST.runtime_image


def test_a_larger_cache_does_not_unpin() -> None:
    """The claim grows under the pods; whether there is a cache is another matter."""
    source = {"source": {"huggingFace": {"repository": "org/name"}}}
    small, large = (deployment(model=source | {"cache": {"size": size}}) for size in ("10Gi", "20Gi"))
    assert choose(large, SECOND, PODS, [stored(small)]).revision.image == FIRST.runtime_image
    assert choose(small, SECOND, PODS, [stored(deployment(model=source))]).number == 2


def test_a_changed_spec_is_planned_anew_with_the_next_number() -> None:
    pin = choose(OTHER, SECOND, PODS, [stored(ONE, 3), stored(deployment(engine={"maxNumSeqs": 2}), 2)])
    assert (pin.number, pin.revision.image) == (4, SECOND.runtime_image)


def test_only_the_newest_record_counts_and_numbers_are_numbers() -> None:
    """Going back to an older spec is a change too: it is rendered again, as today."""
    pin = choose(ONE, SECOND, PODS, [stored(OTHER, 10), stored(ONE, 9)])
    assert (pin.number, pin.revision.image) == (11, SECOND.runtime_image)


def test_a_record_of_another_format_is_replaced() -> None:
    unknown = stored(ONE, 4)
    unknown["data"]["format"] = 99
    assert choose(ONE, SECOND, PODS, [unknown]).number == 5


def test_history_is_limited_and_the_current_record_is_never_pruned() -> None:
    owners = [deployment(engine={"maxNumSeqs": number}) for number in range(1, 9)]
    records = [stored(owner, number) for number, owner in enumerate(owners, start=1)]
    current = choose(owners[-1], FIRST, PODS, records).revision
    to_delete = prunable_records(records, {current.name})
    assert [record["revision"] for record in to_delete] == [4, 3, 2, 1]
    assert len(records) - len(to_delete) == HISTORY_LIMIT
    oldest = choose(owners[0], FIRST, PODS, []).revision
    for options in ({"keep": {oldest.name}}, {"keep": {current.name}, "in_use": {oldest.digest}}):
        assert oldest.name not in [record["metadata"]["name"] for record in prunable_records(records, **options)]


def test_edits_that_change_no_pod_leave_the_history_at_its_limit() -> None:
    """Their records have one digest. What runs keeps its newest record, and the newest that answered."""
    one = choose(ONE, FIRST, PODS, []).revision
    records = [controller_revision(ONE, one, number, Marks(answered=number == 2)) for number in range(1, 9)]
    for record in records:
        record["metadata"]["name"] = f"demo-{record['revision']}"
    to_delete = prunable_records(records, {"demo-8"}, {one.digest})
    assert [record["revision"] for record in to_delete] == [4, 3, 1]


def test_of_large_records_fewer_are_kept_and_never_fewer_than_what_is_needed() -> None:
    def sized(number: int, num_bytes: int) -> Manifest:
        record = controller_revision(ONE, choose(ONE, FIRST, PODS, []).revision, number)
        record["metadata"]["name"] = f"demo-{number}"
        record["data"]["template"]["metadata"]["annotations"] = {"text": "x" * num_bytes}
        return record

    def kept(records: list[Manifest], keep: set[str]) -> list[int]:
        names = {record["metadata"]["name"] for record in prunable_records(records, keep)}
        return [record["revision"] for record in records if record["metadata"]["name"] not in names]

    third, whole = HISTORY_BYTES // 3, HISTORY_BYTES
    assert kept([sized(number, third // 2) for number in range(1, 7)], {"demo-6"}) == [3, 4, 5, 6]
    assert kept([sized(number, third) for number in range(1, 7)], {"demo-6"}) == [5, 6]
    assert kept([sized(number, whole) for number in range(1, 7)], {"demo-6"}) == [6]
    assert kept([sized(number, whole) for number in range(1, 7)], {"demo-6", "demo-2"}) == [2, 6]
    mixed = [sized(1, 10), sized(2, 10), sized(3, whole), sized(4, 10)]
    assert kept(mixed, {"demo-4"}) == [4], "the newest that fit, without a gap"
