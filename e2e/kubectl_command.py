"""Read a kubectl command: its verb, its namespace, and the objects that it names. Pure, but for files of `-f`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

READS = frozenset(
    {
        *("api-resources", "api-versions", "auth", "cluster-info", "config", "describe", "diff", "events"),
        *("explain", "get", "logs", "top", "version", "wait"),
    }
)
MAKES = frozenset({"apply", "create", "replace"})
# Flags whose value is a word of its own. One that is missing here only makes its value look like a name.
FLAGS_WITH_VALUE = frozenset(
    {
        *("-c", "--container", "-f", "--filename", "-l", "--selector", "-n", "--namespace", "-o", "--output"),
        *("-p", "--patch", "--as", "--field-manager", "--field-selector", "--raw", "--subresource", "--timeout"),
        "--type",
    }
)
WORDS_BEFORE_KIND = {"rollout": 1, "set": 1}  # as in `rollout restart deployment/x`
VERBS_OF_PODS = frozenset({"attach", "cp", "debug", "exec", "port-forward", "run"})
_NAMESPACE_OF_PATH = re.compile(r"/namespaces/([^/]+)/")


@dataclass(frozen=True, slots=True)
class Target:
    """One object, or all of a kind where `name` is empty. `kind`: as it was written, such as `crd`."""

    kind: str
    name: str = ""
    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KubectlCommand:
    verb: str
    namespace: str
    all_namespaces: bool
    is_write: bool
    raw_path: str
    targets: tuple[Target, ...]

    @property
    def makes_objects(self) -> bool:
        return self.is_write and self.verb in MAKES


def parse(words: Sequence[str], stdin: str | None) -> KubectlCommand:
    """Read the words after `kubectl`."""
    flags, positional = _split(words)
    verb, *rest = positional or [""]
    raw_path = flags.get("--raw", "")
    namespace = flags.get("-n") or flags.get("--namespace") or ""
    files = flags.get("-f") or flags.get("--filename")
    is_dry_run = flags.get("--dry-run", "none") != "none"
    if raw_path and verb != "get":
        inside = _NAMESPACE_OF_PATH.search(raw_path)
        targets = [Target("raw", raw_path, inside.group(1) if inside else "")]
    elif files is not None:
        text = stdin or "" if files == "-" else Path(files).read_text(encoding="utf-8")
        targets = [_target(manifest) for manifest in _manifests(text)]
    else:
        targets = list(_named(verb, rest))
    return KubectlCommand(
        verb=verb,
        namespace=namespace,
        all_namespaces=bool({"-A", "--all-namespaces"} & flags.keys()),
        is_write=verb not in READS and not is_dry_run,
        raw_path=raw_path,
        targets=tuple(targets),
    )


def _split(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    flags: dict[str, str] = {}
    positional: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--":
            break
        if not word.startswith("-") or word == "-":
            positional.append(word)
            continue
        name, equals, value = word.partition("=")
        flags[name] = value if equals else next(rest, "") if name in FLAGS_WITH_VALUE else ""
    return flags, positional


def _named(verb: str, words: Sequence[str]) -> Iterator[Target]:
    """The objects that words name, as `pod a b` or `pod/a` do."""
    if verb in VERBS_OF_PODS:
        yield Target("pod", words[0] if words else "")
        return
    words = words[WORDS_BEFORE_KIND.get(verb, 0) :]
    if not words:
        return
    if "/" in words[0]:
        for word in words:
            kind, _, name = word.partition("/")
            yield Target(kind, name)
        return
    names = [word for word in words[1:] if "=" not in word]  # `label pod x a=b`
    for kind in words[0].split(","):
        yield from (Target(kind, name) for name in names or [""])


def _manifests(text: str) -> Iterator[dict[str, Any]]:
    for document in yaml.safe_load_all(text):
        if document and document.get("kind") == "List":
            yield from document.get("items") or []
        elif document:
            yield document


def _target(manifest: Mapping[str, Any]) -> Target:
    metadata = manifest.get("metadata") or {}
    name, namespace = str(metadata.get("name") or ""), str(metadata.get("namespace") or "")
    return Target(str(manifest.get("kind") or ""), name, namespace, metadata.get("labels") or {})
