"""What a Python file documents, as plain paragraphs, and its code without that documentation."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
MIN_WORDS, MIN_LETTER_PERCENT = 6, 78
_ROLE = re.compile(r":[a-z:]+:`~?\.?([^`<]+)(?: <[^`]*>)?`")


@dataclass(frozen=True, slots=True)
class DocumentedItem:
    """The documentation of one thing."""

    kind: str  # module, class, function or field
    name: str  # dotted, from the module; of a module, empty
    paragraphs: tuple[str, ...]  # at least one


def entries(text: str) -> list[DocumentedItem]:
    """Docstrings, strings below attributes, and `description=` of fields; an unreadable file has none."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    return [
        DocumentedItem(kind, name, found)
        for kind, name, documentation in _walk(tree, "")
        if (found := paragraphs(documentation))
    ]


def _walk(node: Documented, name: str) -> Iterator[tuple[str, str, str]]:
    kind = {ast.Module: "module", ast.ClassDef: "class"}.get(type(node), "function")
    if docstring := ast.get_docstring(node, clean=False):
        yield kind, name, docstring
    for position, child in enumerate(node.body):
        match child:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from _walk(child, f"{name}.{child.name}".lstrip("."))
            case ast.AnnAssign(target=ast.Name(id=field), value=value) if kind == "class":
                following = node.body[position + 1] if position + 1 < len(node.body) else None
                if documentation := _below(following) or _description(value):
                    yield "field", f"{name}.{field}", documentation
            case _:
                pass


def _below(statement: ast.stmt | None) -> str:
    match statement:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return text
        case _:
            return ""


def _description(value: ast.expr | None) -> str:
    match value:
        case ast.Call(keywords=keywords):
            for keyword in keywords:
                match keyword:
                    case ast.keyword(arg="description", value=ast.Constant(value=str(text))):
                        return text
                    case _:
                        pass
    return ""


def paragraphs(documentation: str) -> tuple[str, ...]:
    """Whole sentences of running text, one line per paragraph; examples, tables and lists of types are left out."""
    found = []
    in_fence = False
    for block in re.split(r"\n\s*\n", inspect.cleandoc(documentation)):
        fences = block.count("```")
        if not in_fence and not fences and ">>>" not in block and _is_level(block):
            line = _plain(block)
            if _is_running_text(line):
                found.append(line)
        in_fence ^= fences % 2 == 1
    return tuple(found)


def _is_level(block: str) -> bool:
    """Whether no line is indented: code, and lists of parameters, are."""
    return not any(line[:1].isspace() for line in block.splitlines()) and not block.startswith((".. ", ":param"))


def _plain(block: str) -> str:
    block = re.sub(r"^[^\n]+\n[-=~^]{3,}(\n|$)", "", block)  # the heading of a section
    line = " ".join(block.split())
    line = _ROLE.sub(r"`\1`", line).replace("``", "`")
    return re.sub(r"::$", ":", line)


def _is_running_text(line: str) -> bool:
    letters = sum(character.isalpha() or character == " " for character in line)
    return (
        len(line.split()) >= MIN_WORDS  # so that it is not empty
        and line[-1] in ".!?:"
        and (line[0].isupper() or line[0] == "`")
        and 100 * letters >= MIN_LETTER_PERCENT * len(line)
        and line.isascii()
    )


def code(text: str) -> str:
    """The file without docstrings; empty where it cannot be read, or is not ASCII."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return ""
    lines: list[str | None] = list(text.splitlines())
    for node in ast.walk(tree):
        if not isinstance(node, Documented) or ast.get_docstring(node) is None:
            continue
        first, last = node.body[0].lineno - 1, (node.body[0].end_lineno or node.body[0].lineno) - 1
        indent = " " * node.body[0].col_offset
        lines[first : last + 1] = [None] * (last + 1 - first)
        if len(node.body) == 1 and not isinstance(node, ast.Module):
            lines[last] = f"{indent}pass"
    kept = "\n".join(line for line in lines if line is not None)
    return re.sub(r"\n{3,}", "\n\n\n", kept).strip() + "\n" if kept.isascii() else ""
