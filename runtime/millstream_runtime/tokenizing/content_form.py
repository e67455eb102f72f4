"""Which form of a message's content a chat template takes: a text, or a list of parts `{"type": "text", "text": …}`.

A template that walks the content of messages takes parts, as vLLM reads it from the parsed template:

    {% for message in messages %}{% for part in message.content %}

Many take both, and not equally well: of parts, Llama 3.2 Vision prints a system prompt as a list of Python. So where a
template reads parts at all, two short chats are rendered in both forms, and a text is given as a text unless parts show
more of the words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jinja2 import nodes

WORDS = ("cakes", "bread", "flour", "sugar")
TRIAL_CHATS = (
    [{"role": "user", "content": WORDS[0]}],
    [
        {"role": role, "content": word}
        for role, word in zip(("system", "user", "assistant", "user"), WORDS, strict=True)
    ],
)


def words_shown(prompts: Iterable[str | None]) -> int:
    """How many words of TRIAL_CHATS show in their prompts; None is a chat that the template refused."""
    return sum(word in prompt.lower() for prompt in prompts if prompt is not None for word in WORDS)


def reads_parts(template: nodes.Template) -> bool:
    """Whether it names the field `text`, which a part has and a text has not."""
    by_attribute = any(node.attr == "text" for node in template.find_all(nodes.Getattr))
    return by_attribute or any(node.value == "text" for node in template.find_all(nodes.Const))


def walks_parts(template: nodes.Template) -> bool:
    """Whether it loops over the content of a message."""
    loops = list(template.find_all(nodes.For))
    message_names = set(_targets(loops, _names_of_messages(template), None))
    return any(_targets(loops, message_names, "content"))


def _names_of_messages(template: nodes.Template) -> set[str]:
    """`messages`, and the variables that it or a part of it is assigned to."""
    names_of: dict[str, list[str]] = {}
    for assignment in template.find_all(nodes.Assign):
        name = _variable(assignment.node)
        if name is not None and isinstance(assignment.target, nodes.Name):
            names_of.setdefault(name, []).append(assignment.target.name)
    names, waiting = {"messages"}, ["messages"]
    while waiting:
        for name in names_of.get(waiting.pop(), ()):
            if name not in names:
                names.add(name)
                waiting.append(name)
    return names


def _targets(loops: list[nodes.For], names: set[str], key: str | None) -> Iterator[str]:
    """The variables of loops over one of these variables, or over a field of one."""
    for loop in loops:
        walked = _variable(loop.iter) if key is None else _owner(loop.iter, key)
        if walked in names and isinstance(loop.target, nodes.Name):
            yield loop.target.name


def _variable(node: nodes.Node | None) -> str | None:
    bare = _bare(node)
    return bare.name if isinstance(bare, nodes.Name) and bare.ctx == "load" else None


def _owner(node: nodes.Node | None, key: str) -> str | None:
    """The variable of `variable.key` or `variable["key"]`."""
    bare = _bare(node)
    owner: nodes.Node | None = None
    if isinstance(bare, nodes.Getattr):
        owner = bare.node if bare.attr == key else None
    elif isinstance(bare, nodes.Getitem) and isinstance(bare.arg, nodes.Const):
        owner = bare.node if bare.arg.value == key else None
    return owner.name if isinstance(owner, nodes.Name) and owner.ctx == "load" else None


def _bare(node: nodes.Node | None) -> nodes.Node | None:
    """What filters, tests and slices are applied to."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    return node
