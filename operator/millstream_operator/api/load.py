"""Read an LLMDeployment from a YAML file, as strictly as the API server does with kubectl's strict validation.

    text -> YAML nodes (with their lines) -> plain values -> typed LLMDeployment -> rules across fields

A file may hold other documents too (a Namespace, a Secret); exactly one LLMDeployment must be among them, and of its
errors the first is raised. `manifest_errors` takes several, and lists all errors of all of them. Every error is one
sentence that names the file, the line, the field, what stands there and what may stand there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from millstream_operator.api import API_VERSION, GROUP, KIND
from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.rules import Violation, violations
from millstream_operator.api.validation.allowed import NOTHING, Allowed
from millstream_operator.api.validation.field_errors import field_errors, shown_value
from millstream_operator.api.validation.field_hints import unknown_field_hint
from millstream_operator.api.validation.ratchets import new_violations

MAX_MANIFEST_BYTES = 3 << 20  # what the API server reads at most
MAX_NODES = 100_000
MAX_CHARACTERS = MAX_MANIFEST_BYTES  # of all scalars, with each alias written out
MAX_DEPTH = 64
MAX_ERRORS = 100  # of one file
_YAML = "tag:yaml.org,2002:"
JSON_TAGS = frozenset(f"{_YAML}{name}" for name in ("map", "seq", "str", "int", "float", "bool", "null"))
STRING_TAGS = frozenset(f"{_YAML}{name}" for name in ("timestamp", "value", "merge"))  # JSON has none of these types
NAME = "metadata.name"
NO_KEY = "a key that is no string; a template with {{ … }} must be rendered first"
_SURROGATE = re.compile("[\\ud800-\\udfff]")


class ManifestError(ValueError):
    """The manifest cannot be used. `str()` is one sentence for the person who wrote it. `line`: where, from 1."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.line = line


def load_manifest(path: str | Path, allowed: Allowed = NOTHING) -> LLMDeployment:
    """The one LLMDeployment of a YAML or JSON file. `allowed`: see `new_violations`.

    Raises:
        ManifestError: no such file, malformed YAML, no or several LLMDeployments, or one that is not valid.
    """
    path = Path(path)
    return loads_manifest(_read_text(path), str(path), allowed)


def loads_manifest(text: str, source: str = "manifest", allowed: Allowed = NOTHING) -> LLMDeployment:
    """As `load_manifest`, from a string; `source` is what errors call it."""
    nodes, error = _documents(text, source)
    if error is not None:
        raise error
    is_json = text.lstrip().startswith("{")
    values = [_Constructor(source, is_json=is_json).construct(node) for node in nodes]
    ours = _find_ours(values, source)
    if len(ours) > 1:
        raise ManifestError(f"{source}: holds {len(ours)} {KIND}s; give one file to each.")
    return _validate(values[ours[0]], _Lines(source, nodes[ours[0]]), allowed)


def manifest_errors(path: Path, allowed: Allowed = NOTHING) -> list[ManifestError]:
    """All errors of all LLMDeployments of a file, in the order of its lines; at most MAX_ERRORS.

    A document with a malformed value or a key that is given twice has this error alone, and none is read behind YAML
    that is malformed: what it means is not known.
    """
    source = str(path)
    try:
        text = _read_text(path)
    except ManifestError as error:
        return [error]
    nodes, malformed = _documents(text, source)
    errors, read = [] if malformed is None else [malformed], list[tuple[yaml.Node, Any]]()
    for node in nodes:
        try:
            read.append((node, _Constructor(source, is_json=text.lstrip().startswith("{")).construct(node)))
        except ManifestError as error:
            errors.append(error)
    try:
        ours = _find_ours([value for _, value in read], source)
    except ManifestError as error:
        return errors or [error]
    for index in ours:
        errors += _check(read[index][1], _Lines(source, read[index][0]), allowed)[1]
    errors.sort(key=lambda error: error.line)
    more = ManifestError(f"{source}: {len(errors) - MAX_ERRORS} more errors are not shown.")
    return errors if len(errors) <= MAX_ERRORS else [*errors[:MAX_ERRORS], more]


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise ManifestError(f"{path}: larger than 3 MiB, so it is no LLMDeployment manifest.")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ManifestError(f"{path}: not a text file in UTF-8 ({error.reason} at byte {error.start}).") from None
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read: {error.strerror}.") from None


def _documents(text: str, source: str) -> tuple[list[yaml.Node], ManifestError | None]:
    """Return the documents up to the first error of the YAML itself, and that error."""
    nodes: list[yaml.Node] = []
    try:
        nodes.extend(node for node in yaml.compose_all(text, Loader=_BoundedLoader) if node is not None)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        return nodes, ManifestError(f"{source}: {yaml_problem(error)}", mark.line + 1 if mark else 0)
    except _TooDeep as error:
        message = f"{source}:{error.line}: nested deeper than {MAX_DEPTH} levels."
        return nodes, ManifestError(message, error.line)
    return nodes, None


def parse(manifest: dict[str, Any]) -> LLMDeployment:
    """An LLMDeployment as the API server stores it, checked as a manifest is.

    Raises:
        ManifestError: the stored object is not valid for this version of the operator.
    """
    return _validate(manifest, None, NOTHING)


class _Lines:
    """Finds the line of a field, for messages."""

    def __init__(self, source: str, root: yaml.Node) -> None:
        self.source, self.root = source, root

    def error(self, location: Sequence[int | str], message: str) -> ManifestError:
        line = self._line(location)
        return ManifestError(f"{self.source}:{line}: {message}", line)

    def _line(self, location: Sequence[int | str]) -> int:
        node = self.root
        for step in location:
            child = self._child(node, step)
            if child is None:
                break
            node = child
        return int(node.start_mark.line) + 1

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
        line = node.start_mark.line + 1
        return ManifestError(f"{self.source}:{line}: {problem}.", line)

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


def _find_ours(values: Sequence[Any], source: str) -> list[int]:
    """Indices of the documents that are, or are meant to be, LLMDeployments: at least one."""
    if not values:
        raise ManifestError(f"{source}: empty; expected an {KIND} ({API_VERSION}).")
    ours = [
        index
        for index, value in enumerate(values)
        if isinstance(value, dict)
        and (value.get("kind") == KIND or str(value.get("apiVersion", "")).startswith(f"{GROUP}/"))
    ]
    if ours:
        return ours
    kinds = sorted({str(value.get("kind", "no kind")) if isinstance(value, dict) else "no object" for value in values})
    advice = "; give one of its items, in a file by itself" if kinds == ["List"] else ""
    raise ManifestError(f"{source}: expected kind {KIND} ({API_VERSION}), found {', '.join(kinds)}{advice}.")


def _validate(manifest: dict[str, Any], lines: _Lines | None, allowed: Allowed) -> LLMDeployment:
    deployment, errors = _check(manifest, lines, allowed)
    if deployment is None or errors:
        raise errors[0]
    return deployment


def _check(
    manifest: dict[str, Any], lines: _Lines | None, allowed: Allowed
) -> tuple[LLMDeployment | None, list[ManifestError]]:
    """The object and all its errors; the one that a person should read first is the first.

    Rules across fields are looked at where each field for itself is right, as the API server does.
    """

    def error_at(location: Sequence[int | str], message: str) -> ManifestError:
        return lines.error(location, message) if lines else ManifestError(message)

    try:
        # Strict JSON mode takes an enum's name, which strict Python mode would not. By alias alone: a manifest that
        # says max_num_seqs would be refused by the API server, so it is refused here.
        deployment = LLMDeployment.model_validate_json(json.dumps(manifest), by_alias=True, by_name=False)
    except ValidationError as invalid:
        fields = field_errors(invalid)
        hints = [unknown_field_hint(field.location) if field.is_unknown_field else "" for field in fields]
        return None, [error_at(field.location, field.sentence(hint)) for field, hint in zip(fields, hints, strict=True)]
    newly = new_violations(deployment, allowed) if lines is not None else ()  # what is stored may break them
    errors = []
    for violation in (*violations(deployment), *newly):
        if violation.message.startswith(f"{NAME} "):  # the API server has no place for a rule of the name but the root
            words = violation.message.removeprefix(NAME)
            errors.append(error_at(NAME.split("."), f"{NAME} is {shown_value(deployment.name)}; it{words}"))
            continue
        names = violation.path.replace("[", ".").replace("]", "").split(".") if violation.path else []
        steps = [int(name) if name.isdigit() else name for name in names]
        errors.append(error_at(steps, _with_value(violation, manifest, steps)))
    return deployment, errors


def _with_value(violation: Violation, manifest: Any, steps: Sequence[int | str]) -> str:
    """Return what the API server says, and the value where the rule is about that of one field."""
    if not violation.message.startswith("must "):
        return str(violation)
    for step in steps:
        manifest = manifest[step]
    value = manifest if violation.shown is None else violation.shown
    return f"{violation.path} is {shown_value(value)}; it {violation.message}"
