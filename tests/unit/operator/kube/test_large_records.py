"""Of large revisions the index keeps the needed ones whole, and the others without their data."""

from __future__ import annotations

from typing import Any

from millstream_operator.kube.index import Index, OwnerKey
from millstream_operator.kube.kinds import CONTROLLER_REVISION
from millstream_operator.kube.large_records import RECORD_BYTES
from millstream_operator.planning.plan import PlanDefaults
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.revision import controller_revision, read_revision
from millstream_operator.rendering.revision_marks import NEW_MARKS, Marks
from millstream_operator.rollout.pruning import prunable_records
from tests.support.llmdeployments import NAMESPACE, deployment
from tests.support.pinned_plans import choose

Manifest = dict[str, Any]
OWNER = deployment()
PLANNED = choose(OWNER, PlanDefaults("registry.example.com/runtime:1"), PodDefaults(), []).revision
KEY = OwnerKey(NAMESPACE, "demo")


def record(number: int, num_bytes: int, *, answered: bool = False, version: int | None = None) -> Manifest:
    made = controller_revision(OWNER, PLANNED, number, Marks(answered=True) if answered else NEW_MARKS)
    name = f"demo-{number}"
    made["metadata"] |= {"name": name, "uid": name, "resourceVersion": str(version or number)}
    texts = {f"text{part}": f"{number}{part}".ljust(num_bytes // 64, "x") for part in range(64)}
    return {**made, "data": {**made["data"], "template": {"metadata": {"annotations": texts}}}}


def whole(index: Index) -> list[int]:
    records = index.children(KEY, CONTROLLER_REVISION)
    return sorted(one["revision"] for one in records if read_revision(one) is not None)


def test_the_newest_and_the_newest_that_answered_are_whole_in_any_order() -> None:
    large = [record(number, RECORD_BYTES, answered=number in (1, 2)) for number in range(1, 6)]
    for order in (large, large[::-1], [large[place] for place in (2, 0, 4, 1, 3)]):
        index = Index()
        for one in order:
            index.put(CONTROLLER_REVISION, one)
        assert whole(index) == [2, 5]
        assert len(index.children(KEY, CONTROLLER_REVISION)) == 5, "all are counted"


def test_small_ones_and_what_fits_together_stay_whole() -> None:
    index = Index()
    for number in range(1, 6):
        index.put(CONTROLLER_REVISION, record(number, 8000))
    assert whole(index) == [1, 2, 3, 4, 5]
    index = Index()
    for number in range(1, 6):
        index.put(CONTROLLER_REVISION, record(number, RECORD_BYTES // 3))
    assert whole(index) == [4, 5]


def test_what_is_held_without_data_is_pruned_first() -> None:
    index = Index()
    for number in range(1, 4):
        index.put(CONTROLLER_REVISION, record(number, RECORD_BYTES, answered=number == 3))
    records = index.children(KEY, CONTROLLER_REVISION)
    assert [one["revision"] for one in prunable_records(records, {"demo-3"})] == [2, 1]


def test_one_that_is_needed_again_comes_whole_with_the_next_listing() -> None:
    index = Index()
    all_of_them = [record(number, RECORD_BYTES) for number in (1, 2)]
    index.replace(CONTROLLER_REVISION, all_of_them, "9")
    assert whole(index) == [2]
    index.remove(CONTROLLER_REVISION, all_of_them[1])
    index.replace(CONTROLLER_REVISION, all_of_them[:1], "9")
    assert whole(index) == [1]
    marked = [record(1, RECORD_BYTES, answered=True, version=10), record(3, RECORD_BYTES)]
    index.replace(CONTROLLER_REVISION, marked, "11")
    assert whole(index) == [1, 3]
