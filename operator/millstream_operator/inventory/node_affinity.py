"""Required node affinity: the terms of a pod, and whether the labels of a node satisfy one of them. Pure.

nodeSelectorTerms: one of them must hold, and of that one all matchExpressions
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Expression = tuple[str, str, tuple[str, ...]]  # key, operator, values
Term = frozenset[Expression]
Terms = frozenset[Term]
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def read_terms(affinity: Mapping[str, Any]) -> Terms:
    """The required terms of a pod's `affinity`; empty where any node will do."""
    required = (affinity.get("nodeAffinity") or {}).get(REQUIRED) or {}
    return frozenset(_term(term) for term in required.get("nodeSelectorTerms") or ())


def admit(terms: Iterable[Term], labels: Mapping[str, str]) -> bool:
    """Whether a node with these labels satisfies one of the terms, or there is none."""
    every = list(terms)
    return not every or any(all(_holds(one, labels) for one in term) for term in every)


def in_words(terms: Iterable[Term]) -> str:
    """`zone In (a, b) and disk Exists, or pool In (gpu)`."""
    return ", or ".join(sorted(" and ".join(map(_words, sorted(term))) for term in terms))


def and_each(terms: Sequence[Mapping[str, Any]], expression: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Add one expression to each of the alternatives, as the API has them. Without any it is the only one."""
    return [{"matchExpressions": [*(term.get("matchExpressions") or ()), expression]} for term in terms or ({},)]


def _term(term: Mapping[str, Any]) -> Term:
    return frozenset(
        (str(one["key"]), str(one["operator"]), tuple(sorted(map(str, one.get("values") or ()))))
        for one in term.get("matchExpressions") or ()
    )


def _words(expression: Expression) -> str:
    key, operator, values = expression
    return f"{key} {operator} ({', '.join(values)})" if values else f"{key} {operator}"


def _holds(expression: Expression, labels: Mapping[str, str]) -> bool:
    key, operator, values = expression
    found = labels.get(key)
    if operator in ("In", "NotIn"):
        return (found in values) is (operator == "In")
    if operator in ("Exists", "DoesNotExist"):
        return (found is not None) is (operator == "Exists")
    if operator not in ("Gt", "Lt") or found is None or len(values) != 1:
        return False
    try:
        return int(found) > int(values[0]) if operator == "Gt" else int(found) < int(values[0])
    except ValueError:
        return False
