"""What the API server asks of a pod's affinity and a schema cannot say: how operators and values belong together."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from millstream_operator.api.validation.rule import Rule, qualified_keys

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
AFFINITY = "spec.podTemplate.spec.affinity"
NODE_EXPRESSIONS = (
    f"{AFFINITY}.nodeAffinity.{REQUIRED}.nodeSelectorTerms[].matchExpressions[]",
    f"{AFFINITY}.nodeAffinity.{PREFERRED}[].preference.matchExpressions[]",
)
POD_TERMS = tuple(
    f"{AFFINITY}.{kind}.{term}"
    for kind in ("podAffinity", "podAntiAffinity")
    for term in (f"{REQUIRED}[]", f"{PREFERRED}[].podAffinityTerm")
)
WITH_VALUES, WITHOUT_VALUES, WITH_NUMBER = ("In", "NotIn"), ("Exists", "DoesNotExist"), ("Gt", "Lt")
WHOLE_NUMBER = "^[0-9]{1,18}$"


def _is_one_of(operators: tuple[str, ...]) -> str:
    return "(" + " || ".join(f"self.operator == '{one}'" for one in operators) + ")"


def _values_fit(path: str) -> Iterator[Rule]:
    yield Rule(
        path,
        f"!{_is_one_of(WITH_VALUES)} || has(self.values)",
        lambda value: value.operator not in WITH_VALUES or value.values is not None,
        "operators In and NotIn need at least one of values.",
    )
    yield Rule(
        path,
        f"!{_is_one_of(WITHOUT_VALUES)} || !has(self.values)",
        lambda value: value.operator not in WITHOUT_VALUES or value.values is None,
        "operators Exists and DoesNotExist take no values.",
    )


def _number_fits(path: str) -> Rule:
    number = f"has(self.values) && self.values.size() == 1 && self.values.all(one, one.matches('{WHOLE_NUMBER}'))"
    return Rule(
        path,
        f"!{_is_one_of(WITH_NUMBER)} || ({number})",
        lambda value: value.operator not in WITH_NUMBER or _is_one_number(value.values),
        "operators Gt and Lt need one whole number in values.",
    )


def _is_one_number(values: Any) -> bool:
    return values is not None and len(values) == 1 and re.fullmatch(WHOLE_NUMBER, values[0]) is not None


def _rules() -> Iterator[Rule]:
    for path in NODE_EXPRESSIONS:
        yield from _values_fit(path)
        yield _number_fits(path)
    for term in POD_TERMS:
        for selector in (f"{term}.labelSelector", f"{term}.namespaceSelector"):
            yield qualified_keys(f"{selector}.matchLabels")
            yield from _values_fit(f"{selector}.matchExpressions[]")


AFFINITY_RULES: tuple[Rule, ...] = tuple(_rules())
