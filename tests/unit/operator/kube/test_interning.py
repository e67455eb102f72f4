"""Equal parts of stored manifests are one object, and unequal ones never are."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from millstream_operator.kube.interning import ManifestInterner

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["", "a", "b"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "x"]), inner, max_size=3),
    max_leaves=12,
)


def exactly(value: Any) -> Any:
    """Distinguishes types that Python takes for equal: True and 1."""
    if isinstance(value, dict):
        return {key: exactly(inner) for key, inner in value.items()}
    return [exactly(inner) for inner in value] if isinstance(value, list) else (type(value), value)


@given(st.lists(JSON, max_size=12))
def test_a_copy_says_what_the_original_says(values: list[Any]) -> None:
    sharing = ManifestInterner(generation=4)
    for value in values:
        before = copy.deepcopy(value)
        stored = sharing.copy({"metadata": {"name": "x"}, "spec": value})
        assert exactly(stored) == exactly({"metadata": {"name": "x"}, "spec": before})


def test_equal_parts_of_two_manifests_are_one() -> None:
    sharing = ManifestInterner()

    def stored(name: str) -> dict[str, Any]:
        probe = {"httpGet": {"path": "/ready", "port": 8000}, "periodSeconds": 5}
        return sharing.copy({"metadata": {"name": name}, "spec": {"name": name, "probes": [probe]}})

    one, other = stored("one"), stored("other")
    assert one["spec"]["probes"] is other["spec"]["probes"]
    assert one["spec"] is not other["spec"]


def test_the_table_does_not_grow_with_what_is_gone() -> None:
    sharing = ManifestInterner(generation=8)
    for number in range(1000):
        sharing.copy({"metadata": {}, "spec": {"number": number}})
    assert len(sharing._young) + len(sharing._old) <= 16


def test_the_table_does_not_keep_long_texts_alive_that_are_gone() -> None:
    sharing = ManifestInterner()
    for number in range(4000):
        sharing.copy({"metadata": {}, "spec": {"env": {"name": "A", "value": f"{number:4096}"}}})
    texts = {
        id(text): text
        for table in (sharing._young, sharing._old)
        for part in table.values()
        for text in (part.values() if isinstance(part, dict) else ())
        if isinstance(text, str)
    }
    assert sum(map(len, texts.values())) < 5 << 20, "of 16 MiB that were met"
