"""Random LLMDeployment specs, from the CRD's own schema: Acto's method (Gu et al., SOSP 2023), with a seed.

A spec is a small one that works with some fields changed: set, changed or taken away, each drawn from what the schema
admits, bounds first. Fields that are added to the API are met without a change here. What the schema cannot say, the
cross-field rules and the planner, decides afterwards whether a spec is a good or a bad one.
"""

from __future__ import annotations

import copy
import random
from re import _constants as constants
from re import _parser as parser
from typing import Any

from tests.soak.api import Object
from tests.soak.experiments import spec_a

# A simulated node takes any number of pods, but each costs time: what counts is that the field is followed.
MOST_REPLICAS = 3
LONGEST_TEXT = 24
_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"


class SpecGenerator:
    """Draws specs; the same seed and schema give the same ones."""

    def __init__(self, schema: Object, seed: int | str) -> None:
        self._schema = schema
        self._random = random.Random(seed)

    def base(self) -> Object:
        """A spec that works."""
        return spec_a() | {"replicas": self._random.choice([1, 2])}

    def mutated(self, spec: Object, most_changes: int = 3) -> Object:
        """The spec with one to `most_changes` fields set, changed or taken away."""
        spec = copy.deepcopy(spec)
        for _ in range(self._random.randint(1, most_changes)):
            self._mutate(spec, self._schema)
        spec["replicas"] = min(spec.get("replicas", 1), MOST_REPLICAS)
        between = spec.get("autoscaling") or {}
        between |= {
            name: min(between[name], MOST_REPLICAS) for name in ("minReplicas", "maxReplicas") if name in between
        }
        return spec

    def _mutate(self, value: Object, schema: Object) -> None:
        """Go down a random way through the schema, making what is absent, and change the leaf."""
        name = self._random.choice(sorted(schema["properties"]))
        inner = schema["properties"][name]
        if name in value and name not in schema.get("required", ()) and self._random.random() < 0.2:
            del value[name]
        elif isinstance(value.get(name), dict) and "properties" in inner and self._random.random() < 0.8:
            self._mutate(value[name], inner)
        else:
            value[name] = self._value(inner)

    def _value(self, schema: Object) -> Any:
        if "enum" in schema:
            return self._random.choice(schema["enum"])
        if schema.get("x-kubernetes-int-or-string"):
            return self._random.choice([1, "2", "512Mi", "1Gi"])
        match schema.get("type"):
            case "object" if "properties" in schema:
                return self._object(schema)
            case "object":
                return {self._text({}): self._value(schema.get("additionalProperties", {})) for _ in range(2)}
            case "array":
                return self._array(schema)
            case "integer":
                return self._integer(schema)
            case "boolean":
                return self._random.choice([True, False])
        return self._text(schema)

    def _object(self, schema: Object) -> Object:
        required = set(schema.get("required", ()))
        optional = sorted(schema["properties"].keys() - required)
        chosen = required | set(self._random.sample(optional, min(len(optional), self._random.choice([1, 1, 2]))))
        return {name: self._value(schema["properties"][name]) for name in sorted(chosen)}

    def _array(self, schema: Object) -> list[Any]:
        most = min(schema.get("maxItems", 2), 2)
        items = [
            self._value(schema["items"]) for _ in range(self._random.randint(max(1, schema.get("minItems", 1)), most))
        ]
        keys = schema.get("x-kubernetes-list-map-keys")
        return list({tuple(item.get(key) for key in keys): item for item in items}.values()) if keys else items

    def _integer(self, schema: Object) -> int:
        low: int = schema.get("minimum", 0)
        high: int = min(schema.get("maximum", 4096), 8192)
        return self._random.choice([low, low + 1, high, self._random.randint(low, high)])

    def _text(self, schema: Object) -> str:
        if "pattern" in schema:
            return "".join(self._match(parser.parse(schema["pattern"])))[: schema.get("maxLength", 64)]
        length = max(schema.get("minLength", 1), self._random.randint(1, 8))
        return self._random.choice("abcdef") + "".join(self._random.choices(_ALPHABET, k=length - 1))

    def _match(self, tree: Any) -> list[str]:
        """Text that a regular expression matches: a walk over its syntax tree."""
        text: list[str] = []
        for operation, argument in tree:
            if operation is constants.LITERAL:
                text.append(chr(argument))
            elif operation is constants.IN:
                text.append(self._one_of(argument))
            elif operation is constants.ANY:
                text.append("x")
            elif operation is constants.SUBPATTERN:
                text += self._match(argument[-1])
            elif operation is constants.BRANCH:
                text += self._match(self._random.choice(argument[1]))
            elif operation in (constants.MAX_REPEAT, constants.MIN_REPEAT):
                low, high, inner = argument
                for _ in range(self._random.randint(low, min(int(high), low + 3))):
                    text += self._match(inner)
            elif operation is not constants.AT:
                raise ValueError(f"no way to draw {operation} of a regular expression")
        return text

    def _one_of(self, choices: Any) -> str:
        operation, argument = self._random.choice(choices)
        if operation is constants.RANGE:
            return chr(self._random.randint(*argument))
        if operation is constants.CATEGORY:
            return self._random.choice("123" if argument is constants.CATEGORY_DIGIT else "abc")
        return chr(argument)


def spec_schema(crd: Object) -> Object:
    """`spec` of the CRD's served version."""
    version = next(one for one in crd["spec"]["versions"] if one["served"])
    found: Object = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return found
