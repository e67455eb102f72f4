"""Read an LLMDeployment from a YAML file, as strictly as the API server does with kubectl's strict validation.

    text -> YAML nodes (with their lines) -> plain values -> typed LLMDeployment -> rules across fields

A file may hold other documents too (a Namespace, a Secret); exactly one LLMDeployment must be among them. Every
error is one sentence that names the file, the line, the field, what stands there and what may stand there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from millstream_operator.api import API_VERSION, GROUP, KIND
from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.rules import Violation, violations
from millstream_operator.api.validation.field_hints import (
    KEY_HINT,
    QUANTITIES,
    is_required,
    unknown_field_hint,
    wanted,
)
from millstream_operator.api.validation.ratchets import new_violations

Location = tuple[int | str, ...]
MAX_MANIFEST_BYTES = 3 << 20  # what the API server reads at most
MAX_NODES = 100_000
MAX_CHARACTERS = MAX_MANIFEST_BYTES  # of all scalars, with each alias written out
MAX_DEPTH = 64
_YAML = "tag:yaml.org,2002:"
JSON_TAGS = frozenset(f"{_YAML}{name}" for name in ("map", "seq", "str", "int", "float", "bool", "null"))
STRING_TAGS = frozenset(f"{_YAML}{name}" for name in ("timestamp", "value", "merge"))  # JSON has none of these types
LENGTHS = {
    "too_short": ("min_length", "item"),
    "too_long": ("max_length", "item"),
    "string_too_short": ("min_length", "character"),
    "string_too_long": ("max_length", "character"),
}
LONGEST_SHOWN = 80
NAME = "metadata.name"
NO_KEY = "a key that is no string; a template with {{ … }} must be rendered first"
_SURROGATE = re.compile("[\\ud800-\\udfff]")


class ManifestError(ValueError):
    """The manifest cannot be used. `str()` is one sentence for the person who wrote it."""


def load_manifest(path: str | Path, allowed_env: Collection[str] = ()) -> LLMDeployment:
    """The one LLMDeployment of a YAML or JSON file. `allowed_env`: see `new_violations`.

    Raises:
        ManifestError: no such file, malformed YAML, no or several LLMDeployments, or one that is not valid.
    """
    path = Path(path)
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise ManifestError(f"{path}: larger than 3 MiB, so it is no LLMDeployment manifest.")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ManifestError(f"{path}: not a text file in UTF-8 ({error.reason} at byte {error.start}).") from None
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read: {error.strerror}.") from None
    return loads_manifest(text, str(path), allowed_env)


def loads_manifest(text: str, source: str = "manifest", allowed_env: Collection[str] = ()) -> LLMDeployment:
    """As `load_manifest`, from a string; `source` is what errors call it."""
    try:
        documents = [node for node in yaml.compose_all(text, Loader=_BoundedLoader) if node is not None]
        is_json = text.lstrip().startswith("{")
        values = [_Constructor(source, is_json=is_json).construct(node) for node in documents]
    except yaml.YAMLError as error:
        raise ManifestError(f"{source}: {yaml_problem(error)}") from None
    except _TooDeep as error:
        raise ManifestError(f"{source}:{error.line}: nested deeper than {MAX_DEPTH} levels.") from None
    index = _find_ours(values, source)
    lines = _Lines(source, documents[index])
    return _validate(values[index], lines, allowed_env)


def parse(manifest: dict[str, Any]) -> LLMDeployment:
    """An LLMDeployment as the API server stores it, checked as a manifest is.

    Raises:
        ManifestError: the stored object is not valid for this version of the operator.
    """
    return _validate(manifest, None, ())


class _Lines:
    """Finds the line of a field, for messages."""

    def __init__(self, source: str, root: yaml.Node) -> None:
        self.source, self.root = source, root

    def prefix(self, location: Sequence[int | str]) -> str:
        node = self.root
        for step in location:
            child = self._child(node, step)
            if child is None:
                break
            node = child
        return f"{self.source}:{node.start_mark.line + 1}: "

    @staticmethod
    def _child(node: yaml.Node, step: int | str) -> yaml.Node | None:
        if isinstance(node, yaml.MappingNode):
            return next((value for key, value in node.value if key.value == step), None)
        if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            found: yaml.Node = node.value[step]
            return found
        return None


class _TooDeep(Exception):
    """Lists and objects are nested deeper than MAX_DEPTH. `line`: where, from 1."""

    def __init__(self, line: int) -> None:
        super().__init__(line)
        self.line = line


class _BoundedLoader(yaml.SafeLoader):
    """Stops at MAX_DEPTH while it reads: PyYAML's time per bracket grows with the brackets that are open."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.depth >= MAX_DEPTH:
            event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]  # the stubs leave it out
            raise _TooDeep(event.start_mark.line + 1 if event.start_mark is not None else 0)
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


class _Constructor:
    """YAML nodes to JSON values: no duplicate keys, no timestamps, no tags of other languages."""

    def __init__(self, source: str, *, is_json: bool) -> None:
        self.source, self.is_json = source, is_json
        self.scalars = yaml.constructor.SafeConstructor()
        self.under_construction: list[yaml.Node] = []
        self.nodes = 0
        self.characters = 0

    def construct(self, node: yaml.Node) -> Any:
        self._count(node)
        if any(node is parent for parent in self.under_construction):
            raise self._error(node, "an alias that contains itself")
        if len(self.under_construction) >= MAX_DEPTH:
            raise self._error(node, f"nested deeper than {MAX_DEPTH} levels")
        if node.tag not in JSON_TAGS | STRING_TAGS:
            raise self._error(node, f"the tag {node.tag.replace(_YAML, '!!')} has no meaning in a manifest")
        self.under_construction.append(node)
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node)
            if isinstance(node, yaml.SequenceNode):
                return [self.construct(item) for item in node.value]
            return self._scalar(node)
        finally:
            self.under_construction.pop()

    def _count(self, node: yaml.Node) -> None:
        """Aliases of aliases, or of one long string: a small file can unfold to gigabytes."""
        self.nodes += 1
        self.characters += len(node.value) if isinstance(node, yaml.ScalarNode) else 0
        if self.nodes > MAX_NODES or self.characters > MAX_CHARACTERS:
            raise ManifestError(
                f"{self.source}: expands to more than {MAX_NODES} values or {MAX_CHARACTERS} characters."
            )

    def _error(self, node: yaml.Node, problem: str) -> ManifestError:
        return ManifestError(f"{self.source}:{node.start_mark.line + 1}: {problem}.")

    def _mapping(self, node: yaml.MappingNode) -> dict[Hashable, Any]:
        mapping: dict[Hashable, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is None or key in mapping:
                problem = NO_KEY if key is None else f"the key {key!r} is given twice"
                raise self._error(key_node, problem)
            self._count(key_node)
            mapping[key] = self.construct(value_node)
        return mapping

    def _scalar(self, node: yaml.Node) -> Any:
        if _SURROGATE.search(node.value):
            node.value = self._joined(node)
        if node.tag in STRING_TAGS or _is_sexagesimal(node):
            return node.value
        try:
            return self.scalars.construct_object(node)
        except (ValueError, LookupError):  # `!!int many`, `!!bool maybe`, or more digits than Python converts
            shown = node.value if len(node.value) <= 40 else f"{node.value[:37]}..."
            raise self._error(node, f"{shown!r} is no {node.tag.removeprefix(_YAML)}") from None

    def _joined(self, node: yaml.Node) -> str:
        """Return the text with its surrogate pairs as characters: JSON escapes them so, and YAML does not."""
        try:
            if self.is_json:
                return str(node.value).encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        except UnicodeDecodeError:
            pass
        raise self._error(node, "half of a surrogate pair, which is no character")


def _is_sexagesimal(node: yaml.Node) -> bool:
    """Whether PyYAML takes `1:30` for 90; kubectl sends it as a string."""
    return node.tag in (f"{_YAML}int", f"{_YAML}float") and ":" in node.value


def yaml_problem(error: yaml.YAMLError) -> str:
    """Return what is malformed and on which line, as the end of a sentence."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    if "'\\t'" in problem:
        problem = "a tab; YAML is indented with spaces alone"
    return f"malformed YAML on line {mark.line + 1}: {problem}." if mark else f"malformed YAML: {problem}."


def _find_ours(values: Sequence[Any], source: str) -> int:
    """Index of the one document that is, or is meant to be, an LLMDeployment."""
    if not values:
        raise ManifestError(f"{source}: empty; expected an {KIND} ({API_VERSION}).")
    ours = [
        index
        for index, value in enumerate(values)
        if isinstance(value, dict)
        and (value.get("kind") == KIND or str(value.get("apiVersion", "")).startswith(f"{GROUP}/"))
    ]
    if len(ours) > 1:
        raise ManifestError(f"{source}: holds {len(ours)} {KIND}s; give one file to each.")
    if ours:
        return ours[0]
    kinds = sorted({str(value.get("kind", "no kind")) if isinstance(value, dict) else "no object" for value in values})
    advice = "; give one of its items, in a file by itself" if kinds == ["List"] else ""
    raise ManifestError(f"{source}: expected kind {KIND} ({API_VERSION}), found {', '.join(kinds)}{advice}.")


def _validate(manifest: dict[str, Any], lines: _Lines | None, allowed_env: Collection[str]) -> LLMDeployment:
    def fail(location: Sequence[int | str], message: str) -> ManifestError:
        return ManifestError((lines.prefix(location) if lines else "") + message)

    try:
        # Strict JSON mode takes an enum's name, which strict Python mode would not. By alias alone: a manifest that
        # says max_num_seqs would be refused by the API server, so it is refused here.
        deployment = LLMDeployment.model_validate_json(json.dumps(manifest), by_alias=True, by_name=False)
    except ValidationError as error:
        first = field_error(error)
        hint = unknown_field_hint(first.location) if first.is_unknown_field else ""
        raise fail(first.location, first.sentence(hint)) from None
    newly = new_violations(deployment, allowed_env) if lines is not None else ()  # what is stored may break them
    for violation in (*violations(deployment), *newly):
        if violation.message.startswith(f"{NAME} "):  # the API server has no place for a rule of the name but the root
            words = violation.message.removeprefix(NAME)
            raise fail(NAME.split("."), f"{NAME} is {_shown(deployment.name)}; it{words}")
        names = violation.path.replace("[", ".").replace("]", "").split(".") if violation.path else []
        steps = [int(name) if name.isdigit() else name for name in names]
        raise fail(steps, _with_value(violation, manifest, steps))
    return deployment


def _with_value(violation: Violation, manifest: Any, steps: Sequence[int | str]) -> str:
    """Return what the API server says, and the value where the rule is about that of one field."""
    if not violation.message.startswith("must "):
        return str(violation)
    for step in steps:
        manifest = manifest[step]
    value = manifest if violation.shown is None else violation.shown
    return f"{violation.path} is {_shown(value)}; it {violation.message}"


@dataclass(frozen=True, slots=True)
class FieldError:
    """One error. `location`: of the field, without the steps that Pydantic adds."""

    location: Location
    details: ErrorDetails

    @property
    def is_unknown_field(self) -> bool:
        return self.details["type"] == "extra_forbidden"

    def sentence(self, hint: str = "") -> str:
        """Return what is wrong. `hint`: what is added where the field is unknown."""
        name = dotted(self.location) or "the object"
        kind, context = self.details["type"], self.details.get("ctx", {})
        shown, field = _shown(self.details["input"]), str(self.location[-1]) if self.location else ""
        if self.is_unknown_field:
            return f"{name}: unknown field{hint}."
        if kind == "missing":
            return f"{name}: missing; it is required."
        if kind in ("json_invalid", "value_error"):
            words = self.details["msg"].removeprefix("Value error, ")
            return f"{name}: {words}." if self.location else f"{words}."
        if self.details["loc"][-1:] == ("[key]",):
            return f"{dotted(self.location[:-1])}: the key {shown} must be {KEY_HINT}."
        if self.details["input"] is None:
            return f"{name} is empty; give it a value{'' if is_required(self.location) else ' or leave it out'}."
        if length := _length(kind, context):
            return f"{name} is {shown}; it must have {length}."
        return f"{name} is {shown}; it must be {wanted(self.details, field, context)}."


def field_error(error: ValidationError) -> FieldError:
    """Return the error that a person should read first.

    Unknown fields are first: a misspelled required field is both unknown and missing, and the spelling is the cause.
    """
    first = min(error.errors(include_url=False), key=lambda one: 0 if one["type"] == "extra_forbidden" else 1)
    return FieldError(_schema_location(first["loc"]), first)


def dotted(location: Location) -> str:
    """Return a location as it is written in messages: spec.x[0].y."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in location)
    return text.removeprefix(".")


def _schema_location(location: Location) -> Location:
    """Drop the last step that Pydantic adds for the branch of a quantity and for a map's key."""
    ours = location[-1:] == ("[key]",) or (location[-1:] in (("number",), ("text",)) and location[-2] in QUANTITIES)
    return location[:-1] if ours else location


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 3]}..."


def _length(kind: str, context: dict[str, Any]) -> str:
    """`at most 8 items`; empty for an error that is not about a length."""
    if kind not in LENGTHS:
        return ""
    limit, noun = LENGTHS[kind]
    number = context[limit]
    return f"at {'least' if limit == 'min_length' else 'most'} {number} {noun}{'' if number == 1 else 's'}"
