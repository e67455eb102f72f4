"""Jinja's compiler, with a call of the environment wherever it leaves an operation to Python.

{% for x in y %}        environment.check_time() at the head of the body
a ~ b, a[1:2], [a, b]   environment.concatenated, .made
a == b, {a: b}          environment.as_key: what is compared and hashed
{% set %}…{% endset %}  environment.buffer(), as a macro and a call have
"""

from __future__ import annotations

from collections.abc import Callable

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, operators


class TemplateCompiler(CodeGenerator):
    """Jinja's own, with calls of the environment where it leaves an operation to Python."""

    def buffer(self, frame: Frame) -> None:
        frame.buffer = self.temporary_identifier()
        self.writeline(f"{frame.buffer} = environment.buffer()")

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802
        look_at_the_clock = nodes.ExprStmt(nodes.EnvironmentAttribute("check_time()"))
        node.body = [look_at_the_clock, *node.body]
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        by_markup = "markup_join if context.eval_ctx.autoescape else str_join"
        self.write(f"environment.concatenated(({by_markup}), (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        is_slice = isinstance(node.arg, nodes.Slice)
        self.write("environment.made(" if is_slice else "(")
        super().visit_Getitem(node, frame)
        self.write(")")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        self._visit_within("environment.made(", super().visit_List, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        if node.ctx == "load":
            self._visit_within("environment.made(", super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self.write("environment.made({")
        for item in node.items:
            self._visit_within("environment.as_key(", self.visit, item.key, frame)
            self.write(": ")
            self.visit(item.value, frame)
            self.write(", ")
        self.write("})")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802
        self.write("(")
        self._visit_within("environment.as_key(", self.visit, node.expr, frame)
        for operand in node.ops:
            self.write(f" {operators[operand.op]} ")
            is_last = operand is node.ops[-1]
            self._visit_within("(" if is_last else "environment.as_key(", self.visit, operand.expr, frame)
        self.write(")")

    def _visit_within(self, opening: str, visit: Callable[..., None], node: nodes.Node, frame: Frame) -> None:
        self.write(opening)
        visit(node, frame)
        self.write(")")
