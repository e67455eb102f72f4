"""What a stored object may become: CEL for the API server and Python for the claim itself give the same verdict."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millstream_operator.api.load import ManifestError
from millstream_operator.api.model import ModelCache
from millstream_operator.api.validation.transitions import TRANSITIONS
from tests.support.cel import evaluate
from tests.support.llmdeployments import deployment

Cache = dict[str, Any]
BASE: Cache = {"size": "200Gi", "storageClassName": "fast", "accessMode": "ReadWriteMany"}
FINE = {
    "the same": (BASE, BASE),
    "more": (BASE, BASE | {"size": "1Ti"}),
    "the same in other words": ({"size": "1Ti"}, {"size": "1024Gi"}),
    "more, in another unit": ({"size": "1G"}, {"size": "1Gi"}),
    "the default, said": ({"size": "1Gi"}, {"size": "1Gi", "accessMode": "ReadWriteMany"}),
}
REFUSED = {
    "less": (BASE, BASE | {"size": "199Gi"}, "never shrink"),
    "less, in another unit": ({"size": "1Gi"}, {"size": "1G"}, "never shrink"),
    "another class": (BASE, BASE | {"storageClassName": "slow"}, "storageClassName cannot change"),
    "a class": ({"size": "1Gi"}, {"size": "1Gi", "storageClassName": "slow"}, "storageClassName cannot change"),
    "another mode": (BASE, BASE | {"accessMode": "ReadWriteOnce"}, "accessMode cannot change"),
    "a mode": ({"size": "1Gi"}, {"size": "1Gi", "accessMode": "ReadWriteOnce"}, "accessMode cannot change"),
}


def refused_by_cel(old: Cache, new: Cache) -> list[str]:
    return [rule.message for rule in TRANSITIONS if not evaluate(rule.cel, new, old)]


def refused_by_python(old: Cache, new: Cache) -> list[str]:
    before, after = (ModelCache.model_validate_json(json.dumps(cache)) for cache in (old, new))
    return [rule.message for rule in TRANSITIONS if not rule.holds(before, after)]


@pytest.mark.parametrize("name", FINE)
def test_a_volume_may_stay_or_grow(name: str) -> None:
    assert refused_by_cel(*FINE[name]) == refused_by_python(*FINE[name]) == []


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_volume_can_become_is_refused_by_both(name: str) -> None:
    old, new, said = REFUSED[name]
    (message,) = refused_by_python(old, new)
    assert refused_by_cel(old, new) == [message]
    assert said in message


def test_a_spec_without_what_the_message_says_to_remove_is_accepted() -> None:
    """`model.cache` alone cannot go: what is made into it needs it."""
    model = {"source": {"local": {"path": "demo-chat"}}}
    dataset = {"configMapRef": {"name": "calibration", "key": "data.jsonl"}}
    draft = {"draftModel": {"source": {"local": {"path": "demo-draft"}}}}
    made = {"method": "AWQ", "calibration": dataset, "kvCache": "INT8"}
    (message,) = refused_by_python(BASE, BASE | {"storageClassName": "slow"})
    assert "quantization.calibration and speculation.tuning" in message
    deployment(model=model | {"cache": BASE}, quantization=made, speculation=draft | {"tuning": {"dataset": dataset}})
    with pytest.raises(ManifestError, match=r"model\.cache"):
        deployment(model=model, quantization=made, speculation=draft)
    deployment(model=model, quantization={"kvCache": "INT8"}, speculation=draft)
